from __future__ import annotations

import os
import signal
import sys

import pytest

from distlaunch.core.model.run_files import MARKER
from distlaunch.core.model.worker_exit import WorkerExit
from distlaunch.core.protocol import agent_messages as m

CREDIT = 1 << 20
CHUNK = 256 << 10
WRITES = "import os\nfor _ in range({count}): os.write(1, b'x' * 65536)\nos.write(2, b'done')\n"


@pytest.fixture(params=[True, False], ids=["pipes", "socket"])
def either(request, make_agent):
    return make_agent(pipes=request.param)


def test_two_workers_run_and_end_over_pipes_as_over_a_socket(either):
    either.survey()
    either.prepare()
    either.start("print('hello')", "import sys; sys.stderr.write('bad'); sys.exit(7)")
    either.until(m.AttemptEnded)
    exits = {one.rank: (one.returncode, one.stderr_tail) for one in either.of(WorkerExit)}
    assert exits == {0: (0, b""), 1: (7, b"bad")}
    assert either.taken == {(0, 1): b"hello\n", (1, 2): b"bad"}
    assert either.leave() == 0
    assert either.stderr() == ""


def test_messages_about_a_worker_come_in_order(agent):
    agent.start("import os; os.write(1, b'x' * 300000); os.write(2, b'y')", "print(1)")
    agent.until(m.AttemptEnded)
    for rank in (0, 1):
        of_rank = [
            type(one)
            for one in agent.received
            if getattr(one, "rank", None) == rank
            or (isinstance(one, m.Started) and rank in one.pids)
        ]
        outputs = of_rank.count(m.Output)
        assert of_rank == [m.Started, *([m.Output] * outputs), m.RankEnded, WorkerExit]
    assert isinstance(agent.received[-1], m.AttemptEnded)


def test_a_rank_whose_descendant_keeps_its_streams_ends_with_the_attempt(agent):
    agent.start("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n")
    agent.until(WorkerExit)
    agent.send(m.WaitForLeftovers(attempt=0, linger_s=0.0, grace_s=20.0))
    agent.until(m.AttemptEnded)
    kinds = [type(one) for one in agent.received]
    assert kinds.index(m.RankEnded) < kinds.index(m.AttemptEnded)


def test_without_credit_workers_wait_and_nothing_is_lost(agent):
    count = 200
    agent.start(WRITES.format(count=count), "print('small')", credit=CREDIT)
    while agent.size_taken < CREDIT:
        agent.read(30)
    while agent.read(0.3):
        pass
    assert CREDIT <= agent.size_taken <= CREDIT + CHUNK
    assert agent.of(WorkerExit) == [] or agent.of(WorkerExit)[0].rank == 1
    agent.send(m.Ping(serial=5))
    agent.until(m.Pong)
    agent.give_credit_until(m.AttemptEnded)
    assert bytes(agent.taken[0, 1]) == b"x" * 65536 * count
    assert bytes(agent.taken[0, 2]) == b"done"
    assert bytes(agent.taken[1, 1]) == b"small\n"


def test_memory_stays_flat_while_the_credit_is_used_up(agent):
    agent.start(WRITES.format(count=4000), WRITES.format(count=4000), credit=CREDIT)
    while agent.size_taken < CREDIT:
        agent.read(30)
    while agent.read(0.2):
        pass
    before = _memory(agent.process.pid)
    agent.send(m.Ping(serial=1))
    agent.until(m.Pong)
    while agent.read(0.5):
        pass
    assert _memory(agent.process.pid) - before < 4 << 20
    agent.send(m.Stop(attempt=0, signum=signal.SIGTERM, grace_s=20.0))
    agent.until(m.AttemptEnded)
    assert {one.returncode for one in agent.of(WorkerExit)} == {-signal.SIGTERM}


def _memory(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_last_words_come_without_any_credit(agent):
    agent.start("import os; os.write(2, b'last words'); os._exit(9)", credit=0)
    agent.until(m.AttemptEnded)
    assert agent.taken == {(0, 2): b"last words"}
    assert agent.of(WorkerExit)[0].stderr_tail == b"last words"


def test_words_and_environment_arrive_byte_for_byte(agent, worker_spec):
    odd = os.fsdecode(
        b"spaces  and\ttabs \"quotes\" '' $HOME `id` $(id) %h \\ \n newline \xf0\x9f\x90\x8d caf\xe9 \xff\x80 * ? ~ !! #"
    )
    # One string of an environment is 128 KiB at most (MAX_ARG_STRLEN); 300 kB come in several.
    big = {f"BIG_{number}": os.fsdecode(bytes([33 + number]) * 60_000) for number in range(5)}
    shows = (
        "import os, sys\n"
        "sys.stdout.buffer.write(os.fsencode(sys.argv[1]) + b'|' + os.environb[b'ODD'] + b'|' + os.environb[b'OWN'])\n"
        "sys.stdout.buffer.write(b'|' + b''.join(os.environb[b'BIG_%d' % number] for number in range(5)))\n"
    )
    worker = worker_spec(0, [sys.executable, "-c", shows, odd], env={"OWN": odd})
    agent.start(worker, env={**agent.env, "ODD": odd, **big}, is_remote=True)
    agent.until(m.AttemptEnded)
    raw = os.fsencode(odd)
    assert bytes(agent.taken[0, 1]) == b"|".join(
        [raw, raw, raw, b"".join(os.fsencode(value) for value in big.values())]
    )


def test_the_environment_of_a_travelled_start_lies_above_the_nodes_own(make_agent, tmp_path):
    agent = make_agent(
        SSH_CONNECTION="1 2 3 4",
        SSH_CLIENT="1",
        RANK="9",
        OMPI_COMM_WORLD_RANK="1",
        SLURM_JOB_ID="7",
        OWN="node",
        BOTH="node",
        PWD="/nowhere",
    )
    agent.start(
        "import json, os; print(json.dumps(dict(os.environ)))",
        is_remote=True,
        env={"BOTH": "launcher", "SENT": "1"},
        cwd=str(tmp_path),
    )
    agent.until(m.AttemptEnded)
    import json

    env = json.loads(bytes(agent.taken[0, 1]))
    assert (env["OWN"], env["BOTH"], env["SENT"], env["SLURM_JOB_ID"]) == (
        "node",
        "launcher",
        "1",
        "7",
    )
    assert env["HOME"] == agent.env["HOME"]
    assert env["PWD"] == str(tmp_path)
    assert env["RANK"] == "0"
    assert not {"SSH_CONNECTION", "SSH_CLIENT", "OMPI_COMM_WORLD_RANK"} & env.keys()


REPORTS = (
    "import os\n"
    "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file: file.write('{\"message\": 1}')\n"
    "open(os.path.join(os.environ['DISTLAUNCH_RUN_DIR'], 'mine'), 'w').close()\n"
    "print(os.environ['DISTLAUNCH_RUN_DIR'])\n"
)


def test_error_files_travel_where_the_run_directory_is_not(make_agent, worker_spec, tmp_path):
    agent = make_agent()
    run_dir = str(tmp_path / "not there" / "job-1")
    agent.survey(run_dir=run_dir)
    path = f"{run_dir}/attempt-0/rank-0.error.json"
    worker = worker_spec(
        0, [sys.executable, "-c", REPORTS], env={"TORCHELASTIC_ERROR_FILE": path}, error_file=path
    )
    agent.start(worker, is_remote=True, env={**agent.env, "DISTLAUNCH_RUN_DIR": run_dir})
    [exited] = agent.until(WorkerExit)
    assert (exited.returncode, exited.error_file) == (0, '{"message": 1}')
    folder = bytes(agent.taken[0, 1]).decode().strip()
    temporary_dir = os.path.dirname(folder)
    assert os.path.dirname(temporary_dir) == str(make_agent.tmp)
    assert os.stat(temporary_dir).st_mode & 0o777 == 0o700
    assert not os.path.exists(run_dir)
    assert agent.leave() == 0
    assert not os.path.exists(temporary_dir)


def test_a_run_directory_that_is_shared_is_used_as_it_is(agent, worker_spec, tmp_path):
    run_dir = tmp_path / "job-1"
    run_dir.mkdir()
    (run_dir / MARKER).touch()
    assert agent.survey(run_dir=str(run_dir)).shares_run_dir
    path = f"{run_dir}/attempt-0/rank-0.error.json"
    worker = worker_spec(
        0, [sys.executable, "-c", REPORTS], env={"TORCHELASTIC_ERROR_FILE": path}, error_file=path
    )
    agent.start(worker, is_remote=True, env={**agent.env, "DISTLAUNCH_RUN_DIR": str(run_dir)})
    [exited] = agent.until(WorkerExit)
    assert exited.error_file == '{"message": 1}'
    assert os.path.exists(path)
    assert (run_dir / "mine").exists()


def test_the_next_attempt_follows_the_last(agent):
    agent.prepare(0)
    agent.start("import sys; sys.exit(1)")
    agent.until(m.AttemptEnded)
    prepared = agent.prepare(0, attempt=1)
    assert prepared.problem is None
    agent.start("print('second')", attempt=1)
    assert [one.attempt for one in agent.until(m.AttemptEnded, 2)] == [0, 1]
    assert agent.taken[0, 1] == b"second\n"


def test_workers_get_the_limit_of_open_files_that_the_agent_found(make_agent):
    agent = make_agent()
    with open(f"/proc/{agent.process.pid}/limits", encoding="ascii") as file:
        [now] = [line.split()[3] for line in file if line.startswith("Max open files")]
    import resource

    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    agent.start("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    agent.until(m.AttemptEnded)
    assert agent.taken[0, 1] == b"%d %d\n" % found
    assert int(now) >= min(found[1], 1 << 16)


def test_a_worker_inherits_none_of_the_agents_descriptors(agent):
    agent.start("import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))")
    agent.until(m.AttemptEnded)
    assert agent.taken[0, 1] in (b"[0, 1, 2, 3, 100]\n", b"[0, 1, 2, 100, 101]\n")


def test_a_pause_stops_workers_and_its_time_does_not_count(make_agent):
    agent = make_agent(silence_s=1.5)
    agent.start("import time\nprint('up', flush=True)\ntime.sleep(1000)\n")
    agent.until_taken(0, b"up")
    [started] = agent.of(m.Started)
    agent.send(m.Pause(paused=True))
    _until_state(started.pids[0], "T")
    assert not agent.read(2.0), "paused, silence is not counted"
    agent.send(m.Pause(paused=False))
    _until_state(started.pids[0], "S")
    agent.send(m.Stop(attempt=0, signum=signal.SIGTERM, grace_s=20.0))
    agent.until(m.AttemptEnded)


def _until_state(pid: int, state: str) -> None:
    import time

    deadline = time.monotonic() + 30
    while True:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            if file.read().rpartition(")")[2].split()[0] == state:
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)
