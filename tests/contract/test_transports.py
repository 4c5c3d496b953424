from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import closing

import pytest

from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions

# Workers that wait for signals without a gap in which one could come unnoticed.
OBEYS = "import signal; print('up', flush=True); signal.pause()"
SAVES = (
    "import signal\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    "print('up', flush=True)\n"
    "signal.sigwait([signal.SIGTERM])\n"
    "print('saved', flush=True)\n"
)
CATCHES = (
    "import signal\n"
    "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    "print('up', flush=True)\n"
    "signal.sigwait([signal.SIGUSR1])\n"
    "print('got it')\n"
)
SERVES = "import os, socket\nserver = socket.create_server(('127.0.0.1', int(os.environ['PORT'])))\nprint('serving')\n"
DISOBEYS = (
    "import signal\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    "while True: signal.pause()\n"
)


def stop(grace_s: float, *, attempt: int = 0) -> m.Stop:
    return m.Stop(attempt=attempt, signum=signal.SIGTERM, grace_s=grace_s)


def exits(coordinator) -> dict[int, tuple[int, bool]]:
    return {one.rank: (one.returncode, one.told_to_stop) for one in coordinator.of(WorkerExit)}


def test_nothing_has_come_before_something_was_sent(coordinator):
    assert coordinator.transport.receive() == []
    assert coordinator.transport.deadline() is None
    assert coordinator.transport.descriptors()


def test_prepare_is_answered_with_a_port_that_is_held(coordinator):
    prepared = coordinator.prepare()
    assert (prepared.attempt, prepared.problem) == (0, None)
    with closing(socket.socket()) as sock, pytest.raises(OSError, match="in use"):
        sock.bind(("127.0.0.1", prepared.port))


def test_rank_0_can_serve_on_the_port_that_is_held(coordinator):
    coordinator.start(SERVES, env={"PORT": str(coordinator.prepare().port)})
    coordinator.until(m.AttemptEnded)
    assert exits(coordinator) == {0: (0, False)}
    coordinator.until_written(0, b"serving\n")
    assert coordinator.taken.written[0, 1] == b"serving\n"


def test_a_node_that_is_not_the_masters_holds_no_port(coordinator):
    assert coordinator.prepare(port=None).port is None


def test_a_port_that_cannot_be_had_is_a_problem(coordinator):
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        prepared = coordinator.prepare(port=listening.getsockname()[1])
    assert mentions(prepared.problem, "in use")
    assert prepared.port is None


def test_workers_start_end_and_are_gone_in_this_order(coordinator):
    coordinator.prepare()
    coordinator.start("print('hello')", "import sys; print('bad', file=sys.stderr); sys.exit(7)")
    coordinator.until(m.AttemptEnded)
    kinds = [type(message) for message in coordinator.received]
    assert kinds.count(WorkerExit) == 2
    assert kinds.count(m.Started) in (1, 2), "workers that come up at once are told of at once"
    assert kinds[-1] is m.AttemptEnded
    assert kinds.count(m.AttemptEnded) == 1
    assert exits(coordinator) == {0: (0, False), 1: (7, False)}
    for rank in (0, 1):
        of_rank = [
            type(one)
            for one in coordinator.received
            if (isinstance(one, m.Started) and rank in one.pids)
            or (isinstance(one, WorkerExit) and one.rank == rank)
        ]
        assert of_rank == [m.Started, WorkerExit]
    assert coordinator.of(m.AttemptEnded) == [m.AttemptEnded(attempt=0, left=(), port_used=False)]
    started = {rank: pid for one in coordinator.of(m.Started) for rank, pid in one.pids.items()}
    assert started == {one.rank: one.pid for one in coordinator.of(WorkerExit)}


def test_all_output_has_been_taken_when_a_workers_end_is_reported(coordinator):
    coordinator.start("import os; os.write(1, b'x' * 60000); os.write(2, b'last words')")
    [exited] = coordinator.until(WorkerExit)
    assert coordinator.taken.written == {(0, 1): b"x" * 60000, (0, 2): b"last words"}
    assert exited.stderr_tail == b"last words"


def test_the_environment_and_the_words_of_a_worker_arrive_byte_for_byte(coordinator):
    value = os.fsdecode(b"caf\xe9 \xff\n'\"$")
    spec = m.WorkerSpec(
        rank=0,
        local_rank=0,
        argv=("sh", "-c", 'printf %s "$ODD$1"; pwd', "sh", value),
        env={"ODD": value},
        cpus=None,
        error_file=None,
    )
    coordinator.start(specs=(spec,), cwd="/usr")
    coordinator.until(m.AttemptEnded)
    coordinator.until_written(0, os.fsencode(value) * 2 + b"/usr\n")
    assert coordinator.taken.written[0, 1] == os.fsencode(value) * 2 + b"/usr\n"


def test_a_workers_own_variables_win_over_the_common_ones(coordinator):
    coordinator.start(
        "import os; print(os.environ['RANK'], os.environ['A'])", env={"RANK": "9", "A": "a"}
    )
    coordinator.until(m.AttemptEnded)
    coordinator.until_written(0, b"0 a\n")
    assert coordinator.taken.written[0, 1] == b"0 a\n"


@pytest.mark.parametrize(
    ("argv", "cwd", "returncode", "words"),
    [
        (("/nowhere/prog",), "/", 127, b"cannot run /nowhere/prog: No such file or directory"),
        (("/etc/passwd",), "/", 126, b"cannot run /etc/passwd: Permission denied"),
        (
            ("true",),
            "/nowhere",
            127,
            b"cannot enter the working directory: No such file or directory",
        ),
    ],
)
def test_a_program_that_cannot_be_started_ends_with_the_reason(
    coordinator, argv, cwd, returncode, words
):
    spec = m.WorkerSpec(rank=0, local_rank=0, argv=argv, env={}, cpus=None, error_file=None)
    coordinator.start(specs=(spec,), cwd=cwd)
    coordinator.until(m.AttemptEnded)
    [exited] = coordinator.of(WorkerExit)
    assert exited.returncode == returncode
    assert words in exited.stderr_tail


def test_a_node_without_workers_is_gone(coordinator):
    coordinator.start()
    assert coordinator.until(m.AttemptEnded) == [m.AttemptEnded(attempt=0, left=())]


def test_stop_lets_workers_end_in_their_own_way(coordinator):
    coordinator.start(SAVES, OBEYS)
    for rank in (0, 1):
        coordinator.until_written(rank, b"up")
    coordinator.send(stop(30.0))
    coordinator.until(m.AttemptEnded)
    assert exits(coordinator) == {0: (0, True), 1: (-signal.SIGTERM, True)}
    coordinator.until_written(0, b"saved")


def test_after_the_grace_a_worker_is_killed_at_the_deadline(coordinator):
    coordinator.start(DISOBEYS)
    coordinator.until_written(0, b"up")
    before = time.monotonic()
    coordinator.send(stop(0.2))
    if coordinator.is_local:  # else it is the agent that keeps it
        assert before < coordinator.transport.deadline() <= time.monotonic() + 0.2
    coordinator.until(m.AttemptEnded)
    assert exits(coordinator) == {0: (-signal.SIGKILL, True)}
    coordinator.wait(lambda: coordinator.transport.deadline() is None)  # once all is read


def test_a_grace_of_zero_kills(coordinator):
    coordinator.start(DISOBEYS)
    coordinator.until_written(0, b"up")
    coordinator.send(stop(0.0))
    coordinator.until(m.AttemptEnded)
    assert exits(coordinator) == {0: (-signal.SIGKILL, True)}


def test_a_stop_of_another_attempt_ends_nobody(coordinator):
    coordinator.start(OBEYS, attempt=1)
    coordinator.until_written(0, b"up")
    coordinator.send(stop(0.0, attempt=0))
    coordinator.send(m.ForwardSignal(signum=signal.SIGUSR1))
    assert coordinator.transport.receive() == []
    coordinator.send(stop(5.0, attempt=1))
    coordinator.until(m.AttemptEnded)
    assert exits(coordinator) == {0: (-signal.SIGTERM, True)}, "neither KILL nor an uncaught USR1"


def test_user_signals_reach_the_worker_that_catches_them(coordinator):
    coordinator.start(CATCHES)
    coordinator.until_written(0, b"up")
    coordinator.send(m.ForwardSignal(signum=signal.SIGUSR1))
    coordinator.until(m.AttemptEnded)
    assert exits(coordinator) == {0: (0, False)}
    coordinator.until_written(0, b"up\ngot it\n")
    assert coordinator.taken.written[0, 1] == b"up\ngot it\n"


def test_a_pause_stops_and_continues_and_a_stopped_worker_obeys(coordinator):
    coordinator.start(SAVES)
    coordinator.until_written(0, b"up")
    coordinator.send(m.Pause(paused=True))
    coordinator.send(stop(20.0))
    coordinator.until(m.AttemptEnded)
    assert exits(coordinator) == {0: (0, True)}


def test_processes_that_a_worker_leaves_end_before_the_attempt_is_over(coordinator):
    reader, writer = os.pipe()
    daemon = (
        "import os\n"
        "ready, ready_end = os.pipe()\n"
        f"os.dup2(os.open('/proc/{os.getpid()}/fd/{writer}', os.O_WRONLY), 9)\n"
        "os.dup2(ready_end, 8)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execve('/bin/sh', ['sh', '-c', 'trap \"\" TERM HUP; echo up >&9; echo >&8; sleep 1000'], {})\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "os.read(ready, 1)\n"
    )
    coordinator.start(daemon)
    coordinator.until(WorkerExit)
    coordinator.send(m.WaitForLeftovers(attempt=0, linger_s=0.0, grace_s=0.1))
    [gone] = coordinator.until(m.AttemptEnded)
    assert gone.killed.count == 2, "the shell and its child, which both ignore TERM"
    os.close(writer)
    os.set_blocking(reader, False)
    words, rest = os.read(reader, 100), os.read(reader, 100)
    os.close(reader)
    assert (words, rest) == (b"up\n", b""), "somebody still has the pipe open"


def test_the_next_attempt_starts_afresh_with_a_port_of_its_own(coordinator):
    coordinator.prepare()
    coordinator.start("import sys; sys.exit(1)")
    coordinator.until(m.AttemptEnded)
    coordinator.received.clear()
    prepared = coordinator.prepare(attempt=1)
    assert (prepared.attempt, prepared.problem) == (1, None)
    coordinator.start("print('second')", attempt=1)
    coordinator.until(m.AttemptEnded)
    assert [one.attempt for one in coordinator.received if not isinstance(one, m.Prepared)] == [
        1,
        1,
        1,
    ]
    coordinator.until_written(0, b"second\n")
    assert coordinator.taken.written[0, 1] == b"second\n"


def test_receive_never_waits(coordinator):
    coordinator.start(OBEYS)
    coordinator.until_written(0, b"up")
    for _ in range(100):
        coordinator.transport.receive()
    assert coordinator.of(WorkerExit) == []


def test_close_ends_workers_that_disobey_and_gives_everything_back(coordinator):
    prepared = coordinator.prepare()
    coordinator.start(DISOBEYS, DISOBEYS)
    for rank in (0, 1):
        coordinator.until_written(rank, b"up")
    pids = [pid for one in coordinator.of(m.Started) for pid in one.pids.values()]
    coordinator.close()
    assert len(pids) == 2
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", prepared.port))


def test_after_close_a_sink_that_has_room_again_writes_into_no_other_file(coordinator):
    coordinator.close()
    files = [os.memfd_create(f"file-{number}") for number in range(10)]
    coordinator.taken.wake()
    sizes = [os.fstat(fd).st_size for fd in files]
    for fd in files:
        os.close(fd)
    assert sizes == [0] * 10


def test_a_spawner_that_is_killed_is_a_fault_and_nothing_is_left(coordinator):
    coordinator.start(DISOBEYS)
    coordinator.until_written(0, b"up")
    [started] = coordinator.of(m.Started)
    with open(f"/proc/{started.pids[0]}/stat", encoding="ascii") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    [fault] = coordinator.until(m.AgentFailed)
    assert "spawner" in fault.text
    assert not os.path.exists(f"/proc/{started.pids[0]}")
