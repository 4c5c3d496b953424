from __future__ import annotations

import inspect

import pytest

from distlaunch.coordinator.joined.consoles import CoordinatorConsole, ForwardingSink, LocalRanks
from distlaunch.coordinator.runtime.sink import Sink
from distlaunch.core.protocol import launcher_messages as p


class Shown:
    """A console that keeps all calls."""

    def __init__(self) -> None:
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return f"what {name} gives"

        return call


METHODS = [
    name for name, value in inspect.getmembers(Sink, inspect.isfunction) if not name.startswith("_")
]
ARGUMENTS = {
    "output": (3, 1, b"x", 1.0),
    "rank_ended": (3, 1.0),
    "tick": (1.0,),
    "on_room": (print,),
    "event": ({"type": "x"},),
    "status": (None,),
    "say": ("text",),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "wrapped",
    [ForwardingSink, lambda sink: CoordinatorConsole(sink, print), LocalRanks],
    ids=["passing", "coordinator", "local ranks"],
)
def test_everything_is_passed_on_and_what_comes_back_too(name, wrapped):
    shown = Shown()
    keywords = {"timeout_s": 1.0, "hurried": bool} if name == "close" else {}
    given = getattr(wrapped(shown), name)(*ARGUMENTS.get(name, ()), **keywords)
    expected = {"level": "info"} if name == "say" else keywords
    assert shown.calls == [(name, ARGUMENTS.get(name, ()), expected)]
    assert given == (f"what {name} gives" if name in ("tick", "has_room", "close") else None)


def test_ranks_are_counted_from_this_nodes_first():
    shown = Shown()
    sink = LocalRanks(shown)
    sink.first_rank = 8
    sink.output(9, 1, b"x", 2.0)
    sink.rank_ended(8, 3.0)
    assert [call[:2] for call in shown.calls] == [
        ("output", (1, 1, b"x", 2.0)),
        ("rank_ended", (0, 3.0)),
    ]


def made():
    reported = []
    return CoordinatorConsole(Shown(), lambda text, level: reported.append((text, level))), reported


def test_only_warnings_are_reported_to_the_others_at_once():
    console, reported = made()
    console.say("as you were")
    console.say("look out", level="warning")
    console.say("error: no", level="error")
    assert reported == [("look out", "warning")]


def test_the_last_words_of_a_job_that_failed_are_all_its_errors():
    console, _ = made()
    console.say("error: no", level="error")
    console.say("error: never", level="error")
    console.say("logs: /tmp")
    assert console.verdict(1, "no") == p.ExitLauncher(
        exit_code=1, text="error: no\nerror: never", summary="no", is_error=True
    )
    assert console.verdict(0, "").text == ""


def test_the_last_notice_of_a_stopped_job_is_the_last_one_shown():
    console, _ = made()
    console.say("SIGTERM: asking 4 workers to end")
    assert console.verdict(143, "") == p.ExitLauncher(
        exit_code=143, text="SIGTERM: asking 4 workers to end"
    )
