"""One launcher per node: several on this machine are one job."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.process.conftest import PROGRAMS, is_alive, later_than_a_double, until
from tests.process.loopback import LoopbackLaunchers


@pytest.fixture
def launchers(distlaunch):
    return LoopbackLaunchers(distlaunch)


# --- a job of fixed size


@pytest.mark.parametrize("size", [2, 4])
def test_launchers_that_start_in_any_order_are_one_job(launchers, size):
    launchers.start_all(size=size, slots=2)
    reported = launchers.wait_ready(*range(2 * size))
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == dict.fromkeys(range(size), 0)
    for rank, each in enumerate(reported):
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank % 2,
            "NODE_RANK": rank // 2,
            "WORLD_SIZE": 2 * size,
        }
        expected |= {
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_WORLD_SIZE": size,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        assert {name: each[name] for name in expected} == {
            name: str(value) for name, value in expected.items()
        }
    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "DISTLAUNCH_JOB_ID",
        "TORCHELASTIC_RUN_ID",
        "DISTLAUNCH_RUN_DIR",
    ):
        assert len({each[name] for each in reported}) == 1
    assert reported[0]["MASTER_ADDR"] == "127.0.0.1"
    for node in range(size):
        shown = sorted(launchers.by_rank[node].stdout.splitlines())
        assert shown == [f"[{rank}] rank {rank} is here" for rank in (2 * node, 2 * node + 1)]


def test_each_launcher_limits_the_logs_of_its_own_ranks(launchers, distlaunch):
    program = distlaunch.work / "writes.py"
    program.write_text("for number in range(5000):\n    print(number, 'x' * 50)\n")
    words = ("--log-max-size", "64K", "--output", "none")
    launchers.start_all(*words, program=str(program))
    assert launchers.exit_codes() == {0: 0, 1: 0}
    run_dir = launchers.by_rank[0].run_dir
    for rank in (0, 1):
        text = (run_dir / "attempt-0" / f"rank-{rank}.log").read_text()
        assert text.startswith("0 x")
        assert text.splitlines()[-1].startswith("4999 x")
        assert text.count("left out here") == 1
    assert launchers.stderr_of(0).count("--log-max-size") == 1


def test_each_launcher_files_the_output_of_its_own_ranks_only(launchers):
    launchers.start_all()
    (run_dir,) = {each["DISTLAUNCH_RUN_DIR"] for each in launchers.wait_ready(0, 1)}
    launchers.put_sign("end-0")
    launchers.exit_codes()
    names = {str(path.relative_to(run_dir)) for path in Path(run_dir).rglob("*") if path.is_file()}
    assert names - {".distlaunch-run"} == {
        *(
            "events.jsonl",
            "events-1.jsonl",
            "plan-0.json",
            "times-0.index",
            "attempt-0/rank-0.log",
            "attempt-0/rank-1.log",
        )
    }
    assert Path(run_dir, "attempt-0", "rank-1.log").read_text() == "rank 1 is here\n"


def test_launchers_without_a_common_directory_have_each_their_own(launchers, tmp_path):
    launchers.start(0, "--log-dir", str(tmp_path / "a"))
    launchers.start(1, "--log-dir", str(tmp_path / "b"))
    first, second = (Path(each["DISTLAUNCH_RUN_DIR"]) for each in launchers.wait_ready(0, 1))
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == {0: 0, 1: 0}
    assert (first.parent, second.parent, first.name) == (
        tmp_path / "a",
        tmp_path / "b",
        second.name,
    )
    assert (first / "attempt-0" / "rank-0.log").exists()
    assert not (first / "attempt-0" / "rank-1.log").exists()
    assert (second / "attempt-0" / "rank-1.log").exists()


def test_a_log_that_only_another_node_has_is_named_with_that_node(launchers, tmp_path):
    for rank in (0, 1):
        launchers.start(rank, "--log-dir", str(tmp_path / str(rank)))
    folder = Path(launchers.wait_ready(0, 1)[0]["DISTLAUNCH_RUN_DIR"]).name
    launchers.put_sign("fail-0-1")
    assert set(launchers.exit_codes().values()) == {7}
    where = f"  log: {folder}/attempt-0/rank-1.log in the log directory of {socket.gethostname()}, if rank 1 wrote any"
    for rank in (0, 1):
        assert where in launchers.stderr_of(rank).splitlines()
    assert (tmp_path / "1" / folder / "attempt-0" / "rank-1.log").exists()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_on_any_node_ends_all_launchers_with_its_code_and_reason(launchers, failing):
    launchers.start_all(size=3)
    pids = [each["pid"] for each in launchers.wait_ready(0, 1, 2)]
    launchers.put_sign(f"fail-0-{failing}")
    assert launchers.exit_codes() == dict.fromkeys(range(3), 7)
    for node in range(3):
        assert f"rank {failing} of 3" in launchers.stderr_of(node)
        assert "exit code 7" in launchers.stderr_of(node)
    assert not any(map(is_alive, pids))


def test_a_restart_is_one_of_the_whole_job_and_counted_the_same_everywhere(launchers):
    launchers.start_all("--max-restarts", "2", "--min-uptime", "0", size=3)
    before = launchers.wait_ready(0, 1, 2)
    launchers.put_sign("fail-0-2")
    after = launchers.wait_ready(0, 1, 2, attempt=1)
    launchers.put_sign("end-1")
    assert launchers.exit_codes() == dict.fromkeys(range(3), 0)
    assert {each["TORCHELASTIC_RESTART_COUNT"] for each in after} == {"1"}
    assert {each["MASTER_PORT"] for each in after}.isdisjoint(
        {each["MASTER_PORT"] for each in before}
    )
    for node in range(3):
        assert "restart 1 of 2" in launchers.stderr_of(node)


def test_the_coordinator_delays_a_restart_for_all_launchers(launchers):
    launchers.start_all("--max-restarts", "1", "--restart-delay", "0.5", size=2)
    launchers.wait_ready(0, 1)
    launchers.put_sign("fail-0-1")
    launchers.wait_ready(0, 1, attempt=1)
    launchers.put_sign("end-1")
    assert launchers.exit_codes() == {0: 0, 1: 0}
    for node in range(2):
        assert "restarting in 0.5 s ..." in launchers.stderr_of(node)


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_any_launcher_ends_the_delay_of_a_restart(launchers, signalled):
    launchers.start_all("--max-restarts", "1", "--restart-delay", "1h")
    launchers.wait_ready(0, 1)
    launchers.put_sign("fail-0-1")
    for launcher in launchers.by_rank.values():
        launcher.wait_stderr("restarting in 3,600 s ...")
    launchers.by_rank[signalled].send_signal(signal.SIGTERM)
    assert launchers.exit_codes() == {0: 143, 1: 143}


@pytest.mark.parametrize("signalled", [0, 1])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_any_launcher_stops_the_job(launchers, signalled, number, code):
    launchers.start_all()
    launchers.wait_ready(0, 1)
    launchers.by_rank[signalled].send_signal(number)
    assert launchers.exit_codes() == {0: code, 1: code}


def test_a_signal_that_all_launchers_get_counts_once(launchers):
    launchers.start_all(size=3)
    launchers.wait_ready(0, 1, 2)
    for running in launchers.by_rank.values():
        running.send_signal(signal.SIGUSR1)
    until(
        lambda: all((launchers.distlaunch.work / f"usr1-{rank}").exists() for rank in range(3)),
        "USR1 came everywhere",
    )
    for running in launchers.by_rank.values():
        running.send_signal(signal.SIGINT)
    assert launchers.exit_codes() == dict.fromkeys(range(3), 130)
    assert [(launchers.distlaunch.work / f"usr1-{rank}").read_text() for rank in range(3)] == [
        "."
    ] * 3
    assert not any("killing" in launchers.stderr_of(node) for node in range(3))


def test_an_upload_of_another_launchers_worker_may_end_after_the_training(launchers):
    launchers.start_all("--linger", "100", program="uploads.py", job=("--ranks", "1"))
    line = f"waiting up to 100 s (--linger) for 1 process left by rank 1 on {socket.gethostname()}: python"
    for node in (0, 1):
        launchers.by_rank[node].wait_stderr(line)
    launchers.put_sign("go")
    assert launchers.exit_codes() == {0: 0, 1: 0}
    assert (launchers.distlaunch.work / "uploaded-1").exists()


@pytest.mark.parametrize("signalled", [0, 1])
def test_the_programs_of_wrappers_save_under_one_launcher_per_node(launchers, signalled):
    job = (str(PROGRAMS / "waits.py"), "--save", "TERM")
    launchers.start_all("--grace", "100", program="wraps.py", job=job)
    has = lambda *signs: all((launchers.distlaunch.work / sign).exists() for sign in signs)  # noqa: E731
    until(lambda: has("ready-0", "ready-1"), "the programs run")
    launchers.by_rank[signalled].send_signal(signal.SIGTERM)
    until(lambda: has("got-TERM-0", "got-TERM-1"), "they were asked to end")
    launchers.put_sign("go")
    assert launchers.exit_codes() == {0: 143, 1: 143}
    assert has("saved-0", "saved-1")


def test_ctrl_c_twice_at_any_launcher_kills_all_workers(launchers):
    launchers.start_all("--grace", "600", program="ignores_signals.py")
    pids = [each["pid"] for each in launchers.wait_ready(0, 1)]
    peer = launchers.by_rank[1]
    peer.send_signal(signal.SIGINT)
    peer.wait_stderr("press Ctrl-C again after 1 s to kill all workers now")
    launchers.by_rank[0].wait_stderr("asking 2 workers to end")
    later_than_a_double()
    peer.send_signal(signal.SIGINT)
    assert launchers.exit_codes() == {0: 130, 1: 130}
    assert not any(map(is_alive, pids))


def test_a_launcher_is_stopped_while_it_waits_for_the_coordinator(launchers):
    running = launchers.start(1)
    launchers.wait_for_connections(1)
    running.send_signal(signal.SIGTERM)
    assert launchers.exit_codes() == {1: 143}


def test_signals_that_end_nobody_do_not_end_a_launcher_that_waits(launchers):
    running = launchers.start(1)
    launchers.wait_for_connections(1)
    for number in (signal.SIGWINCH, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGCHLD):
        running.send_signal(number)
    launchers.start(0)
    launchers.wait_ready(0, 1)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == {0: 0, 1: 0}


# --- launchers that are lost


def test_a_killed_joined_launcher_is_noticed_and_ends_the_job(launchers):
    launchers.start_all(size=3)
    pids = [each["pid"] for each in launchers.wait_ready(0, 1, 2)]
    os.kill(launchers.by_rank[2].pid, signal.SIGKILL)
    assert launchers.exit_codes() == {0: 69, 1: 69, 2: -9}
    assert "node" in launchers.stderr_of(0)
    assert "lost" in launchers.stderr_of(1)
    until(lambda: not any(map(is_alive, pids)), "all workers have ended")


def test_a_killed_spawner_of_the_coordinator_ends_the_job_though_a_restart_is_left(launchers):
    launchers.start_all("--max-restarts", "1", "--join-timeout", "20")
    reported = launchers.wait_ready(0, 1)
    worker = Path(f"/proc/{reported[0]['pid']}/stat").read_text()
    os.kill(int(worker.rpartition(")")[2].split()[1]), signal.SIGKILL)
    assert launchers.exit_codes() == {0: 70, 1: 70}
    until(lambda: not any(is_alive(each["pid"]) for each in reported), "all workers have ended")


@pytest.mark.parametrize("rank", [0, 1])
def test_term_at_the_spawner_of_a_launcher_ends_the_job(launchers, rank):
    launchers.start_all()
    worker = Path(f"/proc/{launchers.wait_ready(0, 1)[rank]['pid']}/stat").read_text()
    os.kill(int(worker.rpartition(")")[2].split()[1]), signal.SIGTERM)
    assert launchers.exit_codes() == {0: 143, 1: 143}


def test_a_killed_coordinator_ends_the_job_where_no_restart_is_left(launchers):
    launchers.start_all(size=3)
    pids = [each["pid"] for each in launchers.wait_ready(0, 1, 2)]
    os.kill(launchers.by_rank[0].pid, signal.SIGKILL)
    assert launchers.exit_codes() == {0: -9, 1: 69, 2: 69}
    assert "node 0" in launchers.stderr_of(1)
    until(lambda: not any(map(is_alive, pids)), "all workers have ended")


def test_a_coordinator_that_comes_back_goes_on_where_the_first_was(launchers):
    launchers.start_all("--max-restarts", "3", size=3)
    before = launchers.wait_ready(0, 1, 2)
    os.kill(launchers.by_rank[0].pid, signal.SIGKILL)
    launchers.by_rank[0].wait()
    launchers.start(0, "--max-restarts", "3", size=3)
    reported = launchers.wait_ready(0, 1, 2, attempt=1)
    launchers.put_sign("end-1")
    assert launchers.exit_codes() == dict.fromkeys(range(3), 0)
    assert {each["TORCHELASTIC_RESTART_COUNT"] for each in reported} == {"1"}
    for name in (
        "DISTLAUNCH_JOB_ID",
        "TORCHELASTIC_RUN_ID",
    ):  # though the second coordinator has made up its own
        assert len({each[name] for each in reported}) == 1
    assert reported[1]["DISTLAUNCH_RUN_DIR"] == before[1]["DISTLAUNCH_RUN_DIR"]
    assert reported[1]["DISTLAUNCH_JOB_ID"] != before[1]["DISTLAUNCH_JOB_ID"]
    events = Path(reported[1]["DISTLAUNCH_RUN_DIR"], "events-1.jsonl").read_text().splitlines()
    rejoined = [each for each in map(json.loads, events) if each["type"] == "rejoined"]
    assert [each["job_id"] for each in rejoined] == [reported[0]["DISTLAUNCH_JOB_ID"]]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_that_was_asked_for_is_not_forgotten_when_the_coordinator_is_lost(
    launchers, number, code
):
    launchers.start_all("--max-restarts", "3")
    pids = [each["pid"] for each in launchers.wait_ready(0, 1)]
    coordinator, peer = launchers.by_rank[0], launchers.by_rank[1]
    coordinator.send_signal(signal.SIGSTOP)
    peer.send_signal(number)
    peer.wait_stderr("telling node 0")
    coordinator.send_signal(signal.SIGKILL)
    assert launchers.exit_codes() == {0: -9, 1: code}
    assert not is_alive(pids[1])
    until(lambda: not is_alive(pids[0]), "all workers have ended")


def test_a_launcher_waits_for_the_join_timeout(launchers):
    launchers.start_all("--lost-after", "1000h", "--grace", "1000h", "--failure-grace", "1000h")
    launchers.wait_ready(0, 1)
    launchers.by_rank[1].send_signal(signal.SIGTERM)
    assert launchers.exit_codes() == {0: 143, 1: 143}
    assert not any("internal error" in launchers.stderr_of(node) for node in (0, 1))


def test_a_joined_launcher_that_is_replaced_joins_the_next_attempt(launchers):
    launchers.start_all("--max-restarts", "1", size=3, env={"DISTLAUNCH_FAILURE_GRACE": "0.1"})
    launchers.wait_ready(0, 1, 2)
    os.kill(launchers.by_rank[1].pid, signal.SIGKILL)
    launchers.by_rank[1].wait()
    launchers.start(1, "--max-restarts", "1", size=3)
    reported = launchers.wait_ready(0, 1, 2, attempt=1)
    launchers.put_sign("end-1")
    assert launchers.exit_codes() == dict.fromkeys(range(3), 0)
    assert [each["NODE_RANK"] for each in reported] == ["0", "1", "2"]


# --- nodes that come and go; launchers without ranks


def test_an_elastic_job_goes_on_without_a_lost_node_and_takes_it_in_again(launchers):
    words = ("--max-restarts", "1", "--min-uptime", "0", "--failure-grace", "0.1")
    for rank in (2, 1, 0):
        launchers.start(rank, *words, size="2:3")
    launchers.wait_ready(0, 1, 2)
    os.kill(launchers.by_rank[1].pid, signal.SIGKILL)
    launchers.by_rank.pop(1).wait()
    reported = launchers.wait_ready(0, 1, attempt=1)
    assert {each["WORLD_SIZE"] for each in reported} == {"2"}
    launchers.start(1, *words, size="2:3")
    launchers.by_rank[0].wait_stderr("may take part from the next attempt on")
    launchers.put_sign("fail-1-1")
    reported = launchers.wait_ready(0, 1, 2, attempt=2)
    assert {each["WORLD_SIZE"] for each in reported} == {"3"}
    launchers.put_sign("end-2")
    assert launchers.exit_codes() == dict.fromkeys(range(3), 0)


def test_an_elastic_job_starts_with_the_fewest_that_it_needs(launchers):
    launchers.start(0, "--join-timeout", "6", size="2:3")
    launchers.start(2, "--join-timeout", "6", size="2:3")
    reported = launchers.wait_ready(0, 1)
    assert {each["WORLD_SIZE"] for each in reported} == {"2"}
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == {0: 0, 2: 0}


def test_an_elastic_job_to_which_nobody_comes_starts_as_soon_as_the_wait_is_over(launchers):
    launchers.start(0, "--join-timeout", "1", size="1:2")
    [reported] = launchers.wait_ready(0)
    assert reported["WORLD_SIZE"] == "1"
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == {0: 0}


def test_launchers_without_ranks_are_numbered_as_they_come(launchers):
    for name in ("a", "b", "c"):
        launchers.by_rank[name] = launchers.start(None, size=3)
    launchers.by_rank.pop(None)
    reported = launchers.wait_ready(0, 1, 2)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == dict.fromkeys("abc", 0)
    assert sorted(each["NODE_RANK"] for each in reported) == ["0", "1", "2"]


def test_where_each_node_has_a_launcher_each_of_them_has_the_first_failure_in_its_own_file(
    launchers,
):
    for rank in (1, 0):
        env = {"TORCHELASTIC_ERROR_FILE": str(launchers.distlaunch.work / f"error-{rank}.json")}
        rendezvous = [
            "--num-nodes",
            "2",
            "--node-rank",
            str(rank),
            "--rendezvous",
            f"127.0.0.1:{launchers.port}",
        ]
        args = ["train", *rendezvous, "--procs-per-node", "1", str(PROGRAMS / "waits_for_signs.py")]
        launchers.by_rank[rank] = launchers.distlaunch.start(args, env=env)
    launchers.wait_ready(0, 1)
    launchers.put_sign("fail-0-1")
    assert launchers.exit_codes() == {0: 7, 1: 7}
    for rank in (0, 1):
        found = json.loads((launchers.distlaunch.work / f"error-{rank}.json").read_text())[
            "message"
        ]
        assert found["errorCode"] == 7
        assert "rank 1 of 2" in found["extraInfo"]["py_callstack"]


# --- torchrun's words; a launcher for each worker


@pytest.mark.parametrize(
    "words",
    [
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}", "--rdzv-id", "7"],
        ["--node-rank", "{rank}", "--master-addr", "127.0.0.1", "--master-port", "{port}"],
    ],
    ids=["c10d", "static"],
)
@pytest.mark.parametrize("template", [False, True], ids=["its prefix", "a template"])
def test_torchruns_words_join_too(launchers, words, template):
    for rank in (1, 0):
        rendezvous = [word.format(rank=rank, port=launchers.port) for word in words]
        args = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--tee", "3", *rendezvous]
        args += ["--duplicate-stdout-filters", "is here", str(PROGRAMS / "waits_for_signs.py")]
        env = (
            {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}/${local_rank}>:"}
            if template
            else {}
        )
        launchers.by_rank[rank] = launchers.distlaunch.start(args, env=env)
    reported = launchers.wait_ready(0, 1, 2, 3)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == {0: 0, 1: 0}
    assert [(each["NODE_RANK"], each["LOCAL_RANK"]) for each in reported] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    by_node = (
        [["<0/0>", "<1/1>"], ["<2/0>", "<3/1>"]] if template else [["[default0]", "[default1]"]] * 2
    )
    shown = [running.stdout for running in launchers.by_rank.values()]
    copied = [
        path.read_text()
        for path in launchers.by_rank[0].run_dir.glob("attempt_0/filtered_stdout*.log")
    ]
    for texts in (shown, copied):
        found = [sorted(line.partition(":")[0] for line in text.splitlines()) for text in texts]
        assert sorted(found) == by_node


@pytest.mark.parametrize("failing", [None, 2])
def test_a_launcher_for_each_worker_becomes_its_rank(launchers, failing):
    for rank in (2, 0, 3, 1):
        env = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2}
        env = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in env.items()}
        args = [
            "train",
            "--rendezvous",
            f"127.0.0.1:{launchers.port}",
            "--device",
            "cpu",
            str(PROGRAMS / "waits_for_signs.py"),
        ]
        launchers.by_rank[rank] = launchers.distlaunch.start(args, env=env)
    reported = launchers.wait_ready(0, 1, 2, 3)
    launchers.put_sign("end-0" if failing is None else f"fail-0-{failing}")
    assert launchers.exit_codes() == dict.fromkeys(range(4), 0 if failing is None else 7)
    for rank, each in enumerate(reported):
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank % 2,
            "NODE_RANK": rank // 2,
            "WORLD_SIZE": 4,
            "LOCAL_WORLD_SIZE": 2,
        }
        assert {name: each[name] for name in expected} == {
            name: str(value) for name, value in expected.items()
        }
        assert f"rank {rank} is here" in launchers.by_rank[rank].stdout


def test_workers_of_all_launchers_reduce_together(launchers):
    source = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "sum_ = torch.tensor([float(dist.get_rank() + 1)])\n"
        "dist.all_reduce(sum_)\n"
        "print('sum', int(sum_), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    (launchers.distlaunch.work / "reduce.py").write_text(source)
    for rank in (2, 1, 0):
        launchers.start(rank, size=3, program=str(launchers.distlaunch.work / "reduce.py"))
    assert launchers.exit_codes(120.0) == dict.fromkeys(range(3), 0), launchers.stderr_of(0)
    assert [launchers.by_rank[rank].stdout for rank in range(3)] == [
        f"[{rank}] sum 6\n" for rank in range(3)
    ]
