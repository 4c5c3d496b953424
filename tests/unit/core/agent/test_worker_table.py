from __future__ import annotations

import errno
import signal

import pytest

from distlaunch.core.agent.workers import worker_table as t
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import spawner_messages as w

CONT = (signal.SIGCONT, w.SCOPE_PROCESS)


def signals(node, actions) -> list[tuple[tuple[int, ...], int, str]]:
    return [(sent.ranks, sent.signum, sent.scope) for sent in node.of(w.Signal, actions)]


def exit_of(node, rank: int) -> WorkerExit:
    return node.table.workers[rank].exit


# --- starting


def test_every_worker_is_launched_and_reported_as_started(make_node, make_spec):
    node = make_node()
    assert node.start(3) == [t.Launch(spec=make_spec(rank)) for rank in range(3)]
    assert node.spawned(2) == [m.Started(attempt=0, pids={2: 102})]
    assert node.spawned(0) == [m.Started(attempt=0, pids={0: 100})]


def test_a_node_without_workers_ends_the_attempt_at_once(make_node):
    node = make_node()
    assert node.start(0) == [w.Sweep()]
    assert node.swept() == [t.CloseOutputs()]
    assert node.closed() == [m.AttemptEnded(attempt=0, left=())]


@pytest.mark.parametrize(
    ("number", "returncode"),
    [
        (errno.ENOENT, 127),
        (errno.ENOTDIR, 127),
        (errno.EACCES, 126),
        (errno.ENOEXEC, 126),
        (errno.EAGAIN, 126),
    ],
)
def test_a_worker_that_cannot_be_started_ends_as_in_a_shell(make_node, number, returncode):
    node = make_node()
    node.start(1)
    assert node.not_spawned(0, "exec", number) == [t.Drain(exit=exit_of(node, 0))]
    [exited] = node.of(WorkerExit, node.drained(0))
    assert (exited.returncode, exited.pid, exited.told_to_stop) == (returncode, 0, False)


@pytest.mark.parametrize(
    ("step", "number", "text"),
    [
        ("exec", errno.ENOENT, b"distlaunch: cannot run python: No such file or directory\n"),
        (
            "chdir",
            errno.EACCES,
            b"distlaunch: cannot enter the working directory: Permission denied\n",
        ),
        (
            "fork",
            errno.EAGAIN,
            b"distlaunch: cannot start the worker (fork): Resource temporarily unavailable\n",
        ),
        (
            "pipe",
            errno.EMFILE,
            b"distlaunch: cannot start the worker (pipe): Too many open files\n",
        ),
    ],
)
def test_the_reason_of_a_failed_start_follows_the_last_output(make_node, step, number, text):
    node = make_node()
    node.start(1)
    node.not_spawned(0, step, number)
    [exited] = node.of(WorkerExit, node.drained(0, tail=b"said\n"))
    assert exited.stderr_tail == b"said\n" + text


def test_a_failed_start_names_the_workers_own_program(make_node, make_spec):
    node = make_node()
    node.start(specs=[make_spec(0, argv=("caf\udce9", "x"))])
    node.not_spawned(0, "exec", errno.ENOENT)
    [exited] = node.of(WorkerExit, node.drained(0))
    assert b"cannot run caf\xe9: " in exited.stderr_tail


def test_a_worker_that_existed_but_could_not_exec_is_reported_with_its_pid(make_node):
    node = make_node()
    node.start(1)
    node.spawned(0)
    node.not_spawned(0, "exec", errno.EACCES)
    [exited] = node.of(WorkerExit, node.drained(0))
    assert (exited.pid, exited.returncode) == (100, 126)


# --- ending


def test_an_exit_is_reported_when_the_last_output_is_read(make_node):
    node = make_node()
    node.start(2)
    node.now = 5.0
    node.spawned(0)
    node.now = 7.5
    assert node.ended(0, 3) == [t.Drain(exit=exit_of(node, 0))]
    node.now = 7.9
    [exited] = node.drained(0, tail=b"last words", error_file='{"message": 1}', oom_kills=2)
    assert exited == WorkerExit(
        attempt=0,
        rank=0,
        pid=100,
        returncode=3,
        uptime_s=2.5,
        ended=7.5,
        told_to_stop=False,
        oom_kills=2,
        error_file='{"message": 1}',
        stderr_tail=b"last words",
    )


def test_after_the_last_worker_come_sweep_outputs_and_end(make_node):
    node = make_node().up(2)
    node.ended(0)
    node.ended(1)
    assert node.of(w.Sweep, node.drained(1)) == []
    assert node.of(w.Sweep, node.drained(0)) == [w.Sweep()]
    assert node.swept(77, 78) == [t.CloseOutputs()]
    assert node.closed() == [m.AttemptEnded(attempt=0, left=(77, 78))]
    assert node.table.running == []


def test_closed_outputs_without_a_sweep_do_not_end_the_attempt(make_node):
    node = make_node().up(1)
    assert node.closed() == []


def test_an_exit_is_reported_without_output_if_reading_takes_too_long(make_node):
    node = make_node().up(2)
    node.now = 10.0
    node.ended(0, 1)
    assert node.table.deadline() == 10.0 + t.DRAIN_S
    node.now += t.DRAIN_S / 2
    assert node.tick() == []
    node.now += t.DRAIN_S / 2
    [exited] = node.of(WorkerExit, node.tick())
    assert (exited.rank, exited.returncode, exited.stderr_tail) == (0, 1, b"")
    assert exited.uptime_s == 10.0
    assert node.drained(0, tail=b"too late") == [], "an end is reported once"
    assert node.table.deadline() is None


def test_the_sweep_also_follows_an_overdue_last_worker(make_node):
    node = make_node().up(1)
    node.ended(0)
    node.now += t.DRAIN_S
    assert node.of(w.Sweep, node.tick()) == [w.Sweep()]


def test_a_second_exit_of_the_same_worker_is_ignored(make_node):
    node = make_node().up(2)
    node.ended(0, 5)
    assert node.ended(0, 6) == []
    [exited] = node.of(WorkerExit, node.drained(0))
    assert exited.returncode == 5


def test_output_of_a_running_or_unknown_worker_is_no_exit(make_node):
    node = make_node().up(1)
    assert node.drained(0) == []
    assert node.drained(9) == []


# --- stopping


def test_stop_signals_running_workers_and_resumes_stopped_ones(make_node):
    node = make_node().up(3)
    node.ended(1)
    assert signals(node, node.stop(signum=signal.SIGINT)) == [
        ((0, 2), signal.SIGINT, w.SCOPE_PROCESS),
        ((0, 2), *CONT),
    ]


def test_a_young_worker_that_ignores_int_gets_term(make_node):
    node = make_node().up(2)
    node.stop(signum=signal.SIGINT, grace_s=30.0)
    node.ended(1)
    assert node.table.deadline() == pytest.approx(node.now + t.AGAIN_S)
    node.now += t.AGAIN_S
    assert signals(node, node.tick()) == [((0,), signal.SIGTERM, w.SCOPE_PROCESS)]


def test_an_older_worker_gets_only_int(make_node):
    node = make_node().up(2)
    node.now += t.YOUNG_S
    node.stop(signum=signal.SIGINT, grace_s=30.0)
    assert node.table.deadline() == pytest.approx(node.now + 30.0)


def test_stop_reaches_workers_that_are_not_reported_yet(make_node):
    node = make_node()
    node.start(2)
    assert signals(node, node.stop())[0] == ((0, 1), signal.SIGTERM, w.SCOPE_PROCESS)


def test_with_no_python_the_process_group_is_signalled(make_node):
    node = make_node().up(1, signal_group=True)
    assert signals(node, node.stop())[0] == ((0,), signal.SIGTERM, w.SCOPE_GROUP)


def test_after_the_grace_the_trees_of_running_workers_are_killed(make_node):
    node = make_node().up(2)
    node.now = 100.0
    node.stop(grace_s=10.0)
    node.now = 109.9
    assert node.tick() == []
    node.ended(1, -15)
    node.drained(1)
    assert node.table.deadline() == 110.0
    node.now = 110.0
    assert signals(node, node.tick()) == [((0,), signal.SIGKILL, w.SCOPE_TREE)]
    assert node.table.deadline() == 110.0 + t.KILL_S


@pytest.mark.parametrize("grace_s", [0, 0.0])
def test_a_grace_of_zero_kills_at_once(make_node, grace_s):
    node = make_node().up(2)
    assert signals(node, node.stop(grace_s=grace_s)) == [((0, 1), signal.SIGKILL, w.SCOPE_TREE)]


@pytest.mark.parametrize(("first", "second", "kill_at"), [(10.0, 3.0, 4.0), (3.0, 10.0, 3.0)])
def test_the_earlier_of_two_graces_counts(make_node, first, second, kill_at):
    node = make_node().up(1)
    node.stop(grace_s=first)
    node.now = 1.0
    node.stop(grace_s=second)
    assert node.table.deadline() == kill_at


def test_an_exit_after_a_stop_is_reported_as_such(make_node):
    node = make_node().up(2)
    node.ended(0, 1)
    node.stop()
    node.ended(1, -15)
    reported = {
        exited.rank: exited.told_to_stop
        for rank in (0, 1)
        for exited in node.of(WorkerExit, node.drained(rank))
    }
    assert reported == {0: False, 1: True}


def test_the_wait_for_the_spawners_answer_is_limited(make_node):
    node = make_node().up(1)
    node.ended(0)
    node.drained(0)
    assert node.table.deadline() == pytest.approx(node.now + t.SWEEP_S)


# --- what workers have left


def left(*pids: int) -> w.Leftovers:
    shown = tuple(w.LeftoverProcess(rank=0, pid=pid, command="python upload.py") for pid in pids)
    return w.Leftovers(count=len(pids), shown=shown)


def remain(node, *pids: int):
    return node.step(w.LeftoversRemain(processes=left(*pids)))


def linger(node, *, linger_s: float = 4.0, grace_s: float = 2.0):
    return node.step(m.WaitForLeftovers(attempt=0, linger_s=linger_s, grace_s=grace_s))


@pytest.fixture
def leaving(make_node):
    """Return a node whose workers have all ended with 0, and one of which left a process."""
    node = make_node().up(1)
    node.ended(0)
    assert node.of(w.Sweep, node.drained(0)) == [w.Sweep()]
    assert remain(node, 77) == []
    return node


def test_leftovers_run_until_all_workers_of_the_job_have_ended(leaving):
    assert leaving.table.deadline() is None
    assert leaving.swept() == [t.CloseOutputs()], "unless it has ended by itself"


def test_after_success_leftovers_get_time_then_term_then_kill(leaving):
    assert linger(leaving) == []
    leaving.now = t.NAMES_S
    assert leaving.tick() == [w.Sweep()]
    assert remain(leaving, 77) == [m.LeftoversRunning(attempt=0, processes=left(77))]
    assert leaving.table.deadline() == 4.0
    leaving.now = 4.0
    assert leaving.tick() == [w.EndLeftovers()]
    assert leaving.table.deadline() == 6.0
    leaving.now = 6.0
    assert leaving.tick() == [w.Sweep(kill=True)]
    leaving.step(w.Swept(left=(), ended=left(77), killed=left(77)))
    assert leaving.closed() == [m.AttemptEnded(attempt=0, left=(), ended=left(77), killed=left(77))]


def test_leftovers_without_time_and_grace_are_killed_at_once(leaving):
    linger(leaving, linger_s=0.0, grace_s=0.0)
    assert leaving.tick() == [w.EndLeftovers(), w.Sweep(kill=True)]


def test_a_stop_ends_the_time_for_leftovers(leaving):
    linger(leaving)
    assert leaving.stop(grace_s=3.0) == [w.EndLeftovers()]
    assert leaving.table.deadline() == 3.0
    assert leaving.stop(grace_s=0) == [w.Sweep(kill=True)]
    assert leaving.stop(grace_s=0) == []


def test_leftovers_of_a_failed_worker_get_term_with_the_stop(make_node):
    node = make_node().up(2)
    node.ended(0, 1)
    node.drained(0)
    actions = node.stop(grace_s=10.0)
    assert [type(action) for action in actions] == [w.Signal, w.Signal, w.EndLeftovers]
    node.now = 4.0
    node.ended(1, -15)
    assert node.of(w.Sweep, node.drained(1)) == [w.Sweep()]
    assert remain(node, 77) == []
    assert node.table.deadline() == 10.0, (
        "the rest of the grace is for all processes of the workers"
    )
    node.now = 10.0
    assert node.tick() == [w.Sweep(kill=True)]


def test_a_stop_after_an_outside_signal_sends_no_second_one(make_node):
    node = make_node().up(1)
    assert node.of(w.EndLeftovers, node.stop(signum=0)) == [w.EndLeftovers(asked=True)]


def test_a_kill_while_output_is_read_kills_leftovers_too(make_node):
    node = make_node().up(1)
    node.ended(0, 1)
    assert node.stop(grace_s=0) == []
    assert node.of(w.Sweep, node.drained(0)) == [w.Sweep(kill=True)]


def test_a_pause_also_stops_leftovers(leaving):
    assert leaving.step(m.Pause(paused=True)) == [
        w.Signal(ranks=(), signum=signal.SIGSTOP, scope=w.SCOPE_TREE, caught_only=False)
    ]


def test_a_spawner_that_does_not_answer_is_given_up(make_node):
    node = make_node().up(1)
    node.ended(0)
    node.drained(0)
    node.now += t.SWEEP_S
    assert node.tick() == [t.GiveUpSpawner()]


def test_unwritten_output_is_given_up_after_a_while_or_on_request(make_node):
    for impatient in (False, True):
        node = make_node().up(1)
        node.ended(0)
        node.drained(0)
        assert node.step(w.Swept(left=())) == [t.CloseOutputs()]
        if not impatient:
            node.now += t.CLOSE_S
        assert (node.stop(grace_s=0) if impatient else node.tick()) == [
            m.AttemptEnded(attempt=0, left=())
        ]


def test_a_late_exit_from_an_earlier_attempt_is_ignored(make_node):
    node = make_node().up(1)
    assert node.step(WorkerExit(rank=0, pid=7, returncode=-9)) == []
    assert node.table.running == [0]


@pytest.mark.parametrize("attempt", [0, 2])
def test_a_stop_of_another_attempt_is_ignored(make_node, attempt):
    node = make_node().up(1, attempt=1)
    assert node.stop(attempt=attempt) == []
    assert node.table.deadline() is None


def test_a_stop_before_any_start_is_ignored(make_node):
    assert make_node().stop(attempt=0) == []


def test_a_worker_that_survives_kill_is_reported_as_killed(make_node):
    node = make_node().up(2)
    node.stop(grace_s=0)
    node.ended(1, -9)
    node.drained(1)
    node.now = t.KILL_S
    assert node.tick() == [t.Drain(exit=exit_of(node, 0))]
    [exited, sweep] = node.drained(0)
    assert (exited.rank, exited.returncode, exited.told_to_stop) == (0, -signal.SIGKILL, True)
    assert sweep == w.Sweep(kill=True)
    assert node.ended(0, -9) == [], "its true end, later, is not told again"
    node.swept(100)
    assert node.closed() == [m.AttemptEnded(attempt=0, left=(100,))]


# --- passing on


def test_user_signals_go_only_to_running_workers_that_catch_them(make_node):
    node = make_node().up(2)
    node.ended(0)
    forwarded = node.step(m.ForwardSignal(signum=signal.SIGUSR1))
    assert forwarded == [
        w.Signal(ranks=(1,), signum=signal.SIGUSR1, scope=w.SCOPE_PROCESS, caught_only=True)
    ]


@pytest.mark.parametrize(("paused", "signum"), [(True, signal.SIGSTOP), (False, signal.SIGCONT)])
def test_a_pause_stops_whole_trees(make_node, paused, signum):
    node = make_node().up(2)
    assert node.step(m.Pause(paused=paused)) == [
        w.Signal(ranks=(0, 1), signum=signum, scope=w.SCOPE_TREE, caught_only=False)
    ]


def test_without_running_workers_nothing_is_signalled(make_node):
    node = make_node()
    assert node.step(m.ForwardSignal(signum=signal.SIGUSR1)) == []
    assert node.step(m.Pause(paused=True)) == []


def test_a_worker_stopped_from_its_terminal_is_reported(make_node):
    node = make_node().up(1)
    assert node.step(w.Halted(rank=0, signum=signal.SIGTSTP)) == [m.WorkerHalted(rank=0)]


@pytest.mark.parametrize(
    "message", [m.Prepare(attempt=0, port=0), m.Input(data=b"x"), m.Resize(rows=1, columns=1)]
)
def test_messages_for_the_agent_are_ignored_by_the_table(make_node, message):
    assert make_node().up(1).step(message) == []


# --- the next attempt


def test_the_next_attempt_starts_afresh(make_node):
    node = make_node().up(2)
    node.stop(grace_s=0)
    for rank in (0, 1):
        node.ended(rank, -9)
        node.drained(rank)
    node.swept(77)
    assert node.closed() == [m.AttemptEnded(attempt=0, left=(77,))]
    node.actions.clear()
    node.up(3, attempt=1)
    assert node.table.deadline() is None
    assert [started.attempt for started in node.of(m.Started)] == [1, 1, 1]
    assert node.finish()[-1] == m.AttemptEnded(attempt=1, left=())
    assert [exited.told_to_stop for exited in node.of(WorkerExit)] == [False] * 3
