from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import signal
import time
from contextlib import suppress

import pytest

from distlaunch.core.protocol import agent_messages as m
from tests.facts import mentions
from tests.process.conftest import spawner_below

UP = "import os, sys, time\nprint('up', flush=True)\n"
OBEYS = UP + "time.sleep(1000)\n"
DISOBEYS = (
    "import signal\nfor each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(each, signal.SIG_IGN)\n"
    + OBEYS
)
SAVES = (
    "import signal, os\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    "print('up', flush=True)\n"
    "signal.sigwait([signal.SIGTERM])\n"
    # More than any pipe holds: nobody may leave it waiting.
    "os.write(1, b'x' * (8 << 20))\n"
    "open({path!r}, 'w').write('saved')\n"
)
DAEMON = (
    "import os, sys\n"
    "mark = os.environ['MARK']\n"
    "ready, end = os.pipe()\n"
    "os.set_inheritable(end, True)\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    # Without our variables, but with the test's mark in its words.
    "        os.execve('/bin/sh', ['sh', '-c', f'trap \"\" TERM HUP; echo >&{end}; sleep 1000', mark], {})\n"
    "    os._exit(0)\n"
    "os.wait()\n"
    "os.read(ready, 1)\n"
)
AT_ONCE = {"orphan_grace_s": 0.3}


def started(agent, *programs: str, **fields) -> list[int]:
    agent.prepare()
    agent.start(*programs, **fields)
    for rank in range(len(programs)):
        agent.until_taken(rank, b"up")
    return [pid for one in agent.of(m.Started) for pid in one.pids.values()]


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def spawner_of(agent) -> int:
    pid = spawner_below(agent.process.pid)
    assert pid is not None
    return pid


def test_the_end_of_the_channel_ends_workers_that_obey_and_those_that_do_not(agent, count_marked):
    started(agent, OBEYS, DISOBEYS, DAEMON + DISOBEYS, **AT_ONCE)
    agent.close()
    assert agent.process.wait(30) == 1
    assert count_marked() == []
    assert mentions(agent.stderr(), "coordinator", "closed")


@pytest.mark.parametrize("grace_s", [30.0, 3.6e6], ids=["30 s", "1000 h"])
def test_workers_whose_coordinator_is_lost_may_write_and_save(agent, tmp_path, grace_s):
    path = str(tmp_path / "checkpoint")
    started(agent, SAVES.format(path=path), orphan_grace_s=grace_s)
    agent.close()
    agent.process.wait(30)
    with open(path, encoding="ascii") as file:
        assert file.read() == "saved"
    assert "Error" not in agent.stderr()


def test_workers_without_any_credit_may_save_too(agent, tmp_path):
    path = str(tmp_path / "checkpoint")
    agent.prepare()
    agent.start(SAVES.format(path=path), orphan_grace_s=30.0, credit=1)
    agent.until_taken(0, b"up")
    agent.close()
    agent.process.wait(30)
    assert os.path.exists(path)


def test_silence_of_the_coordinator_is_its_loss(make_agent, count_marked):
    agent = make_agent(silence_s=1.0)
    started(agent, OBEYS)
    assert agent.until_end() == 1
    assert count_marked() == []
    assert mentions(agent.of(m.AgentEnding)[0].why, "no message", "coordinator")


def test_no_silence_is_too_long_to_wait_for(make_agent):
    agent = make_agent(silence_s=3.6e6)
    agent.send(m.Ping(serial=1, silence_s=1e9))
    agent.until(m.Pong)
    assert agent.leave() == 0
    assert not agent.of(m.AgentEnding)


def test_pings_are_answered_and_keep_the_agent(make_agent):
    agent = make_agent(silence_s=3.0)
    began = time.monotonic()
    serial = 0
    while time.monotonic() < began + 4.0:
        serial += 1
        agent.send(m.Ping(serial=serial))
        agent.until(m.Pong, serial)
        agent.read(0.2)
    pongs = agent.of(m.Pong)
    assert [one.serial for one in pongs] == list(range(1, serial + 1))
    clocks = [agent.of(m.Hello)[0].clock, *(one.clock for one in pongs)]
    assert clocks == sorted(clocks)
    assert abs(clocks[-1] - time.monotonic()) < 30
    assert agent.leave() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_agent_ends_its_workers_and_is_reported(agent, count_marked, signum):
    started(agent, OBEYS, DAEMON + OBEYS)
    agent.process.send_signal(signum)
    assert agent.until_end() == 1
    assert mentions(agent.of(m.AgentEnding)[0].why, f"signal {signum}")
    assert count_marked() == []


def test_an_agent_that_is_killed_leaves_nothing(make_agent, count_marked):
    agent = make_agent()
    run_dir = "/not there/job"
    started(
        agent,
        DISOBEYS,
        DAEMON + DISOBEYS,
        is_remote=True,
        env={**agent.env, "DISTLAUNCH_RUN_DIR": run_dir},
        **AT_ONCE,
    )
    [temporary_dir] = make_agent.tmp.iterdir()
    agent.process.kill()
    agent.until_end()
    until(lambda: not count_marked())
    until(lambda: not temporary_dir.exists())


def test_a_new_temporary_directory_is_in_use_as_long_as_workers_of_a_killed_agent_run(make_agent):
    agent = make_agent()
    order = {"is_remote": True, "env": {**agent.env, "DISTLAUNCH_RUN_DIR": "/not there/job"}}
    agent.prepare()
    agent.start("pass", **order)
    agent.until(m.AttemptEnded)
    [first] = make_agent.tmp.iterdir()
    shutil.rmtree(first)
    agent.prepare(attempt=1)
    agent.start(DISOBEYS, attempt=1, orphan_grace_s=1000.0, **order)
    agent.until_taken(0, b"up")
    [second] = make_agent.tmp.iterdir()
    agent.process.kill()
    agent.until_end()
    folder = os.open(second, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(folder)
        os.kill(agent.of(m.Started)[-1].pids[0], signal.SIGKILL)


def test_an_agent_that_is_killed_leaves_nothing_in_shared_memory(agent):
    name = f"distlaunch-test-{os.urandom(8).hex()}_127.0.0.1_29500_0"
    path = f"/dev/shm/{name}"
    started(
        agent,
        f"open({path!r}, 'x').close()\n" + DISOBEYS,
        env={**agent.env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        shared_memory=(name.replace("127.0.0.1_29500", "{address}_{port}"),),
        **AT_ONCE,
    )
    assert os.path.exists(path)
    agent.process.kill()
    agent.until_end()
    try:
        until(lambda: not os.path.exists(path))
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


def test_a_killed_agents_workers_have_their_grace(agent, tmp_path, count_marked):
    path = str(tmp_path / "checkpoint")
    script = SAVES.format(path=path).replace("os.write(1,", "len(")  # nobody reads any more
    started(agent, script, orphan_grace_s=30.0)
    agent.process.kill()
    until(lambda: not count_marked())
    assert os.path.exists(path)


def test_a_killed_agent_closes_its_channel_at_once(make_agent, count_marked):
    for pipes in (True, False):
        agent = make_agent(pipes=pipes)
        started(agent, DISOBEYS, orphan_grace_s=3.0)
        agent.process.kill()
        agent.until_end()
        assert len(count_marked()) >= 2, "the worker still has its grace, and its parent with it"
    until(lambda: not count_marked())


def test_a_killed_spawner_is_a_fault_and_leaves_nothing(agent, count_marked):
    [pid] = started(agent, DAEMON + DISOBEYS)
    os.kill(spawner_of(agent), signal.SIGKILL)
    [fault] = agent.until(m.AgentFailed)
    assert mentions(fault.text, "spawner", "killed", "signal 9")
    assert not os.path.exists(f"/proc/{pid}")
    assert count_marked() == [agent.process.pid]
    assert agent.leave() == 0


def test_a_signal_to_the_spawner_is_reported_as_the_nodes(agent):
    started(agent, OBEYS)
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(spawner_of(agent), signum)
        agent.until(m.SpawnerSignalled, where=lambda one, signum=signum: one.signum == signum)
    assert len(agent.of(m.SpawnerSignalled)) == 2
    assert agent.leave() == 0


def test_a_signal_to_all_processes_of_a_node_ends_the_node_and_not_the_job(agent):
    started(agent, OBEYS)
    os.kill(spawner_of(agent), signal.SIGTERM)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.until_end() == 1
    assert mentions(agent.of(m.AgentEnding)[0].why, "signal 15")
    assert agent.of(m.SpawnerSignalled) == []


def test_any_two_of_ours_that_are_killed_leave_nothing(make_agent, count_marked):
    """The coordinator's end counts as one: it is the launcher on another machine."""
    agents = []
    for first, second in itertools.permutations(("coordinator", "agent", "spawner", "watcher"), 2):
        agent = make_agent()
        started(agent, DAEMON + DISOBEYS, **AT_ONCE)
        spawner = spawner_of(agent)
        with open(f"/proc/{spawner}/stat", encoding="ascii") as file:
            watcher = int(file.read().rpartition(")")[2].split()[1])
        pids = {"agent": agent.process.pid, "spawner": spawner, "watcher": watcher}
        for victim in (first, second):
            if victim == "coordinator":
                agent.close()
            else:
                with suppress(ProcessLookupError):  # the first took it along
                    os.kill(pids[victim], signal.SIGKILL)
        agents.append(agent)
    for agent in agents:
        if agent.reading >= 0 and agent.process.poll() is None:
            agent.close()
        agent.process.wait(30)
    until(lambda: not count_marked())


def test_a_stopped_agent_wakes_when_its_channel_ends(make_agent, count_marked):
    for pipes in (True, False):
        agent = make_agent(pipes=pipes)
        started(agent, OBEYS)
        agent.process.send_signal(signal.SIGSTOP)
        agent.close()
        assert agent.process.wait(30) == 1
        assert count_marked() == []


def test_a_stopped_agent_that_stays_stopped_is_done_without(agent):
    pids = started(agent, OBEYS, DISOBEYS, **AT_ONCE)
    agent.process.send_signal(signal.SIGSTOP)
    agent.close()

    def gone() -> bool:
        agent.process.send_signal(signal.SIGSTOP)  # its parent of the workers wakes it, once
        return not any(os.path.exists(f"/proc/{pid}") for pid in pids)

    until(gone)
    agent.process.send_signal(signal.SIGCONT)
    agent.process.wait(30)


def test_an_agent_that_was_stopped_for_long_gives_the_coordinator_time(make_agent):
    agent = make_agent(silence_s=3.0)
    agent.prepare()
    agent.process.send_signal(signal.SIGSTOP)
    assert not agent.read(5.0)
    agent.process.send_signal(signal.SIGCONT)
    agent.read(0.5)
    agent.send(m.Ping(serial=1))
    agent.until(m.Pong)
    assert agent.leave() == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        b"\x01\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\x02\x00\x00\x00\x00[]",
        b'\x01\x00\x00\x00\x0b\x00\x00\x00\x00{"t":"Hi!"}',
        b'\x01\x00\x00\x00\x0e\x00\x00\x00\x00{"t":"Credit"}',
        b"\x01\x00\x01\x00\x00\x00\x00\x00\x00" + b"[" * 65536,
        bytes(range(256)) * 16,
    ],
    ids=[
        "another protocol",
        "huge sizes",
        "no object",
        "unknown message",
        "a field missing",
        "deep",
        "bytes",
    ],
)
def test_a_coordinator_that_sends_garbage_is_no_coordinator(agent, count_marked, garbage):
    started(agent, OBEYS, DISOBEYS, **AT_ONCE)
    agent.send_raw(garbage)
    assert agent.until_end() == 70
    assert mentions(agent.stderr(), "coordinator", "invalid message")
    assert count_marked() == []


def test_leaving_kills_what_runs(agent, count_marked):
    started(agent, DISOBEYS, DAEMON + DISOBEYS, orphan_grace_s=60.0)
    assert agent.leave() == 0
    assert count_marked() == []


def test_a_coordinator_that_vanishes_while_the_job_is_paused_is_noticed(agent, count_marked):
    [pid] = started(agent, OBEYS)
    agent.send(m.Pause(paused=True))
    agent.close()
    assert agent.process.wait(30) == 1
    assert count_marked() == []
    assert not os.path.exists(f"/proc/{pid}")


def test_another_agents_workers_on_the_node_are_untouched(make_agent):
    one, other = make_agent(), make_agent()
    started(one, OBEYS)
    [pid] = started(other, OBEYS)
    one.process.kill()
    one.until_end()
    other.send(m.Ping(serial=1))
    other.until(m.Pong)
    assert os.path.exists(f"/proc/{pid}")
    assert other.leave() == 0


def test_process_names_show_the_job_and_not_the_launcher(agent):
    agent.survey(run_dir="/x/my-job")
    started(agent, OBEYS, env={**agent.env, "DISTLAUNCH_JOB_ID": "my-job"})
    titles = {}
    for name, each in (("agent", agent.process.pid), ("spawner", spawner_of(agent))):
        with open(f"/proc/{each}/cmdline", "rb") as file:
            titles[name] = file.read().rstrip(b"\0")
    assert titles == {
        "agent": b"dl-agent: of job my-job",
        "spawner": b"dl-spawner: parent of the workers of job my-job",
    }


def test_a_wedged_start_does_not_keep_the_agent(agent, count_marked):
    agent.send(
        m.Start(
            attempt=0,
            argv=(),
            env=dict(agent.env),
            cwd="/",
            workers=(),
            uses_gpus=False,
            signal_group=False,
            terminal=False,
            rows=0,
            columns=0,
            stdin_rank=None,
        )
    )
    agent.until(m.AttemptEnded)
    agent.close()
    assert agent.process.wait(30) == 1
    assert count_marked() == []
