"""The spawner's decisions about warm start. Tests with a real server are in tests/process."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from distlaunch.core.agent.workers.warm_start import (
    ANSWER_S,
    SLOW_IMPORT_S,
    START_S,
    WarmStart,
    changed_variables,
)
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.probe.python_modules import is_importable, nearest_module
from distlaunch.core.protocol import spawner_messages as w
from tests.facts import mentions

SETUP = w.Setup(
    env={"A": "1", "PYTHONPATH": "/x"}, cwd="/", cookie="c", nofile=256, signal_group=False
)
ARGV = ("python", "train.py")
GONE = 1 << 30
"""A pid that no process has."""
KILLED = 9


def order(rank: int = 0, argv: tuple[str, ...] = ARGV, **env: str) -> w.Spawn:
    return w.Spawn(rank=rank, descriptors=(), argv=argv, env=env, cpus=None, terminal=False)


class Hands:
    """Plays the spawner and records its orders."""

    def __init__(self, error: OSError | None = None) -> None:
        self.reported: list[w.FromSpawner] = []
        self.cold: list[int] = []
        self.up: list[tuple[int, int]] = []
        self.error = error
        self.now = 100.0
        self.server: socket.socket | None = None
        self.warm = WarmStart(
            fork=self.fork,
            cold=lambda spawn, _: self.cold.append(spawn.rank),
            came_up=self.came_up,
            report=self.reported.append,
            clock=lambda: self.now,
        )

    def fork(self, spawn, descriptors) -> int:
        if self.error is not None:
            raise self.error
        self.server = socket.socket(fileno=os.dup(descriptors[-1]))
        return GONE

    def came_up(self, spawn, pid) -> None:
        self.up.append((spawn.rank, pid))

    def start(self, bound_s: float | None = None) -> WarmStart:
        self.warm.preload(
            w.Preload(modules=("json",), argv=ARGV, env={}, bound_s=bound_s), SETUP, 2
        )
        return self.warm

    def ready(self, *ranks: int) -> WarmStart:
        """Return a server that is ready and has these orders."""
        warm = self.start()
        self.say("importing json", "imported", "ready")
        for rank in ranks:
            warm.spawn(order(rank), SETUP, [])
        return warm

    def say(self, *lines: str) -> None:
        assert self.server is not None
        for line in lines:
            self.server.send(line.encode())
        self.warm.read()

    @property
    def reasons(self) -> list[str]:
        return [message.reason for message in self.reported if isinstance(message, w.PreloadFailed)]

    @property
    def notes(self) -> list[tuple[str, float]]:
        return [
            (note.module, note.elapsed_s)
            for note in self.reported
            if isinstance(note, w.StillPreloading)
        ]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.warm.read()


@pytest.fixture
def hands():
    hands = Hands()
    yield hands
    hands.warm.stop()
    if hands.server is not None:
        hands.server.close()


def test_without_a_server_every_worker_starts_cold(hands):
    assert not hands.warm.can_fork(order())
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
def test_workers_are_forked_unless_command_or_load_time_variables_are_their_own(
    hands, spawn, taken
):
    assert hands.start().can_fork(spawn) is taken


def test_a_deadly_signal_cancels_waiting_orders_of_its_ranks(hands):
    warm = hands.start()
    for rank in range(3):
        warm.spawn(order(rank), SETUP, [])
    warm.signal(w.Signal(ranks=(0,), signum=10, scope=w.SCOPE_PROCESS, caught_only=True))
    assert hands.reported == []
    warm.signal(w.Signal(ranks=(0, 2, 9), signum=15, scope=w.SCOPE_PROCESS, caught_only=False))
    assert hands.reported == [WorkerExit(rank=rank, pid=0, returncode=-15) for rank in (0, 2)]
    warm.signal(w.Signal(ranks=(0, 2), signum=9, scope=w.SCOPE_TREE, caught_only=False))
    assert len(hands.reported) == 2


def test_if_the_server_cannot_start_workers_start_cold():
    hands = Hands(OSError(11, "no"))
    warm = hands.start()
    (failed,) = hands.reported
    assert isinstance(failed, w.PreloadFailed)
    assert mentions(failed.reason, "no server")
    assert not warm.can_fork(order())


# --- words of the server and of forked processes


def test_a_worker_counts_once_it_is_ready_and_its_pid_is_known(
    hands,
):
    hands.ready(0, 1)
    hands.say("up 0")
    assert hands.up == []
    hands.say("forked 0:70 1:71")
    assert hands.up == [(0, 70)]
    hands.say("up 1")
    assert hands.up == [(0, 70), (1, 71)]
    assert hands.warm.timeout_s is None


@pytest.mark.parametrize(
    "lines", [("forked 0:70", "broken 0 TypeError: no"), ("broken 0 TypeError: no", "forked 0:70")]
)
def test_after_a_failed_setup_all_workers_start_cold(hands, lines):
    hands.ready(0, 1)
    hands.say(*lines)
    assert hands.cold == [0, 1]
    assert hands.up == []
    (reason,) = hands.reasons
    assert mentions(reason, "TypeError: no")


def test_failures_that_a_cold_start_shares_do_not_end_the_server(hands):
    hands.ready(0, 1)
    hands.say("broken 0", "forked 0:70 1:71", "up 1")
    assert (hands.cold, hands.up, hands.reasons) == ([0], [(1, 71)], [])


def test_a_fork_that_dies_before_running_is_no_exited_worker(hands):
    warm = hands.ready(0)
    hands.say("forked 0:70")
    warm.on_reaped(70, KILLED)
    assert (hands.cold, hands.up) == ([0], [])
    (reason,) = hands.reasons
    assert mentions(reason, "forked worker", "signal 9")


def test_a_fork_that_dies_before_its_pid_is_known_is_no_exited_worker(hands):
    warm = hands.ready(0)
    warm.on_reaped(70, KILLED)
    assert hands.cold == []
    hands.say("forked 0:70")
    assert hands.cold == [0]


def test_an_earlier_process_with_the_same_pid_is_not_the_worker(hands):
    warm = hands.ready(0)
    warm.on_reaped(71, KILLED)  # an orphan of somebody
    hands.say("forked 0:70", "up 0")
    warm.on_reaped(72, KILLED)
    warm.spawn(order(1), SETUP, [])
    hands.say("forked 1:71", "up 1")
    assert hands.up == [(0, 70), (1, 71)]
    assert hands.cold == []


@pytest.mark.parametrize(
    "line", ["forked x:y", "forked 1", "up", "up x", "broken", "hello", "\xff", "ready?"]
)
def test_an_invalid_line_leads_to_a_cold_start(hands, line):
    hands.ready(0)
    hands.say(line)
    assert hands.cold == [0]
    assert mentions(hands.reasons[0], "module", "descriptor")


# --- silence


def test_a_long_import_is_reported_at_growing_intervals(hands):
    hands.start()
    hands.say("importing json")
    for _ in range(100):
        hands.wait(SLOW_IMPORT_S / 2)
    assert [module for module, _ in hands.notes] == ["json"] * 6
    assert [elapsed_s / SLOW_IMPORT_S for _, elapsed_s in hands.notes] == [1, 2, 4, 8, 16, 32]
    assert hands.reasons == []


def test_an_import_times_out_if_hangs_are_detected(hands):
    warm = hands.start(bound_s=5)
    warm.spawn(order(0), SETUP, [])
    hands.wait(6)
    hands.say("importing json")
    hands.wait(4)
    hands.say("importing re")
    hands.wait(4)
    assert hands.cold == []
    hands.wait(1)
    assert hands.cold == [0]
    (reason,) = hands.reasons
    assert mentions(reason, "importing re", "5.0 s")


def test_an_interpreter_that_never_loads_our_code_is_given_up(hands):
    hands.start()
    hands.wait(START_S - 1)
    assert hands.reasons == []
    hands.wait(1)
    (reason,) = hands.reasons
    assert mentions(reason, "60 s", "interpreter")


def test_a_trial_fork_that_does_not_end_is_given_up(hands):
    hands.start()
    hands.say("importing json", "imported")
    hands.wait(ANSWER_S)
    (reason,) = hands.reasons
    assert mentions(reason, "trial fork")


def test_a_server_that_does_not_answer_is_given_up_but_not_while_the_job_is_paused(hands):
    warm = hands.ready(0)
    warm.pause(paused=True)
    hands.wait(10 * ANSWER_S)
    warm.pause(paused=False)
    hands.wait(ANSWER_S - 1)
    assert hands.cold == []
    hands.wait(1)
    assert hands.cold == [0]


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
