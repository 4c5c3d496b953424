"""What the spawner decides about warm start by itself; the server behind it is real in tests/process/test_warm_*.py."""

from __future__ import annotations

import sys

import pytest

from distlaunch.core.agent.warm import WarmStart, changed_variables
from distlaunch.core.probe.modules import is_importable, nearest_module
from distlaunch.core.wire import spawning as w

SETUP = w.Setup(env={"A": "1", "PYTHONPATH": "/x"}, cwd="/", cookie="c", nofile=256, signal_group=False)
ARGV = ("python", "train.py")


def order(rank: int = 0, argv: tuple[str, ...] = ARGV, **env: str) -> w.Spawn:
    return w.Spawn(rank=rank, descriptors=(), argv=argv, env=env, cpus=None, terminal=False)


class Hands:
    """Stands for the spawner: keeps what it was asked to do."""

    def __init__(self, error: OSError | None = None) -> None:
        self.reported: list[w.FromSpawner] = []
        self.cold: list[int] = []
        self.error = error
        self.warm = WarmStart(
            fork=self.fork,
            cold=lambda spawn, _: self.cold.append(spawn.rank),
            came_up=self.came_up,
            report=self.reported.append,
        )

    def fork(self, spawn, descriptors) -> int:
        if self.error is not None:
            raise self.error
        return 0

    def came_up(self, spawn, pid) -> None:
        raise AssertionError

    def start(self) -> WarmStart:
        self.warm.start(w.Preload(modules=("json",), argv=ARGV, env={}), SETUP, 2)
        return self.warm


@pytest.fixture
def hands():
    hands = Hands()
    yield hands
    hands.warm.stop()


def test_before_a_server_was_asked_for_every_worker_starts_cold(hands):
    assert not hands.warm.takes(order())
    assert hands.warm.fileno() == -1
    assert hands.warm.timeout_s is None


@pytest.mark.parametrize(
    ("spawn", "taken"),
    [
        (order(RANK="1"), True),
        (order(OMP_NUM_THREADS="3"), True),
        (order(PYTHONPATH="/x"), True),
        (order(PYTHONPATH="/y"), False),
        (order(LD_PRELOAD="a.so"), False),
        (order(MKL_NUM_THREADS="1"), False),
        (order(argv=("python", "other.py")), False),
    ],
)
def test_workers_are_forked_unless_command_or_load_time_variables_are_their_own(hands, spawn, taken):
    assert hands.start().takes(spawn) is taken


def test_a_deadly_signal_ends_an_order_that_waits_and_no_other(hands):
    warm = hands.start()
    for rank in range(3):
        warm.take(order(rank), SETUP, [])
    warm.call_off(w.Signal(ranks=(0,), signum=10, scope=w.SCOPE_PROCESS, caught_only=True))
    assert hands.reported == []
    warm.call_off(w.Signal(ranks=(0, 2, 9), signum=15, scope=w.SCOPE_PROCESS, caught_only=False))
    assert hands.reported == [w.Exited(rank=rank, pid=0, returncode=-15) for rank in (0, 2)]
    warm.call_off(w.Signal(ranks=(0, 2), signum=9, scope=w.SCOPE_TREE, caught_only=False))
    assert len(hands.reported) == 2


def test_a_server_that_cannot_be_started_is_said_and_what_follows_is_cold():
    hands = Hands(OSError(11, "no"))
    warm = hands.start()
    (failed,) = hands.reported
    assert isinstance(failed, w.PreloadFailed)
    assert failed.reason.startswith("no server can be started")
    assert not warm.takes(order())


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ({}, {}, {}),
        ({"A": "1", "B": "2"}, {"A": "1", "B": "3", "C": ""}, {"B": "3", "C": ""}),
        ({"A": "1", "B": "2"}, {"B": "2"}, {"A": None}),
        ({"A": ""}, {"A": "x"}, {"A": "x"}),
    ],
)
def test_changed_variables_turn_one_environment_into_the_other(old, new, changes):
    assert changed_variables(old, new) == changes


def test_modules_are_looked_for_without_being_imported(tmp_path):
    (tmp_path / "only_here.py").write_text("raise AssertionError\n")
    assert is_importable("only_here", [str(tmp_path)])
    assert not is_importable("only_here", [])
    assert is_importable("sys", [])
    assert "only_here" not in sys.modules
    assert nearest_module("onlyhere", [str(tmp_path)]) == "only_here"
    assert nearest_module("nothing_is_like_this_one_zqx", []) is None
