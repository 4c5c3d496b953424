"""One launcher on each host, without SSH and scheduler, from the rendezvous to the end of the
job."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest

from tests.cluster.hosts import faults
from tests.cluster.launchers_on_hosts import PORT, PROGRAM, HostLaunchers
from tests.facts import mentions

UNAVAILABLE, USAGE = 69, 2
ALL = (0, 1, 2)
SHORT = ("--failure-grace", "2", "--grace", "2")
AGAIN = (*SHORT, "--max-restarts", "1", "--min-uptime", "0")
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def launchers(hosts):
    return HostLaunchers(hosts)


# --- how they meet


@pytest.mark.parametrize(
    "order", [(3, 1, 0, 2), (0, 3, 2, 1)], ids=["rank 0 third", "rank 0 first"]
)
def test_launchers_that_start_in_any_order_are_one_job(launchers, order):
    launchers.start_all(size=4, slots=2, order=order)
    reported = launchers.wait_ready(*range(8))
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == dict.fromkeys(range(4), 0)
    assert [each["host"] for each in reported] == [
        f"n{node}" for node in (1, 2, 3, 4) for _ in range(2)
    ]
    assert [(each["NODE_RANK"], each["LOCAL_RANK"]) for each in reported] == [
        (str(node), str(slot)) for node in range(4) for slot in range(2)
    ]
    for name in ("MASTER_ADDR", "MASTER_PORT", "DISTLAUNCH_JOB_ID"):
        assert len({each[name] for each in reported}) == 1
    for node in range(4):
        shown = sorted(launchers.by_rank[node].stdout.splitlines())
        assert shown == [f"[{rank}] rank {rank} is here" for rank in (2 * node, 2 * node + 1)]


def test_a_late_launcher_is_waited_for(launchers):
    launchers.start(0)
    launchers.start(1)
    launchers.by_rank[0].wait_stderr("2 of 3 nodes")
    launchers.start(2)
    launchers.wait_ready(*ALL)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == dict.fromkeys(ALL, 0)


def test_a_late_coordinator_is_waited_for(launchers):
    launchers.start(2)
    launchers.start(1)
    launchers.wait_for_connections(2)
    launchers.start(0)
    launchers.wait_ready(*ALL)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == dict.fromkeys(ALL, 0)


def test_all_launchers_report_the_missing_and_the_present_nodes(launchers):
    for rank in (2, 0):
        launchers.start(rank, "--join-timeout", "8")
    assert launchers.exit_codes() == {2: UNAVAILABLE, 0: UNAVAILABLE}
    for rank in (2, 0):
        assert mentions(launchers.stderr_of(rank), "node 1", "not called")
        assert "there: n[1,3]" in launchers.stderr_of(rank)


def test_a_second_launcher_of_a_rank_is_rejected_and_both_hosts_are_named(launchers):
    launchers.start(0)
    launchers.start(1).wait_stderr("joined")
    first = launchers.by_rank.pop(1)
    second = launchers.start(1, host="n4")
    launchers.by_rank[1] = first
    assert second.wait().returncode == USAGE
    for message in (second.stderr, launchers.stderr_of(0)):
        assert mentions(message, "two launchers", "rank 1", "n2", "n4")
    launchers.start(2)
    launchers.wait_ready(*ALL)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == dict.fromkeys(ALL, 0)


def test_a_real_training_step_over_launchers_that_met(launchers):
    program = launchers.hosts.work / "step.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(dist.get_rank())\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "model(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()\n"
        "print('gradient', model.module.weight.grad[0].tolist(), flush=True)\n"
        "dist.destroy_process_group()\n"
        "os._exit(0)  # torch 2.13 aborts now and then where an interpreter with DDP ends, under any launcher\n"
    )
    launchers.start_all(program=program, env={"OMP_NUM_THREADS": "1"})
    assert launchers.exit_codes(180) == dict.fromkeys(ALL, 0), launchers.stderr_of(0)
    for rank in ALL:
        assert launchers.by_rank[rank].stdout.splitlines() == [
            f"[{rank}] gradient [4.0, 4.0, 4.0, 4.0]"
        ]


# --- what cannot be


def test_another_number_of_nodes_is_named_by_both(launchers):
    launchers.start(0, "--join-timeout", "8")
    launchers.start(1, "--join-timeout", "8", size=2)
    codes = launchers.exit_codes()
    assert codes[1] == USAGE
    assert codes[0] in (USAGE, UNAVAILABLE)
    for rank in (0, 1):
        assert "for 3" in launchers.stderr_of(rank)


def test_scripts_that_differ_are_named_by_all(launchers):
    for name in ("a", "b"):
        (launchers.hosts.work / name).mkdir()
        (launchers.hosts.work / name / "t.py").write_text(f"print({name!r})\n")
    for rank, name in enumerate("aab"):
        launchers.start(rank, program=launchers.hosts.work / name / "t.py")
    assert launchers.exit_codes() == dict.fromkeys(ALL, USAGE)
    for rank in ALL:
        assert mentions(launchers.stderr_of(rank), "t.py", "not the same")
        assert "n3" in launchers.stderr_of(rank)


def test_a_launcher_with_a_wrong_token_is_rejected_and_the_others_go_on(launchers):
    for rank in (0, 1):
        launchers.start(rank, env={"DISTLAUNCH_TOKEN": "correct horse battery"})
    wrong = launchers.start(
        2, "--join-timeout", "8", env={"DISTLAUNCH_TOKEN": "another long phrase"}
    )
    assert wrong.wait().returncode == UNAVAILABLE
    assert mentions(wrong.stderr, "token", "same")
    assert mentions(launchers.stderr_of(0), "token", "same")
    launchers.start(2, env={"DISTLAUNCH_TOKEN": "correct horse battery"})
    reported = launchers.wait_ready(*ALL)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == dict.fromkeys(ALL, 0)
    assert {each["DISTLAUNCH_TOKEN"] for each in reported} == {None}


def test_a_rendezvous_host_that_is_nobody_is_named(launchers):
    launchers.start(1, "--join-timeout", "2", at=f"nobody:{PORT}")
    assert launchers.exit_codes() == {1: UNAVAILABLE}
    assert "nobody" in launchers.stderr_of(1)


def test_a_rendezvous_port_that_something_else_has_is_reported_by_all(launchers):
    web = launchers.hosts.popen(
        "n1", [sys.executable, "-m", "http.server", str(PORT)], stdout=-3, stderr=-3
    )
    with launchers.hosts.socket("n2") as caller:
        address = (launchers.hosts.address("n1"), PORT)
        launchers.hosts.run("n2", "true")
        while caller.connect_ex(address):
            pass
    launchers.start(1, "--join-timeout", "4")
    launchers.start(0, "--join-timeout", "4")
    assert launchers.exit_codes() == {0: USAGE, 1: UNAVAILABLE}
    web.kill()
    web.wait()
    assert f"port {PORT}" in launchers.stderr_of(0)
    assert f"n1:{PORT}" in launchers.stderr_of(1)


# --- how a job ends


@pytest.mark.parametrize(
    ("failing", "words"), [(0, ()), (0, ("ignore-signals",)), (1, ("ignore-signals",)), (2, ())]
)
def test_a_failure_on_any_node_ends_all_launchers(launchers, failing, words):
    launchers.start_all(*SHORT, words=words)
    launchers.wait_ready(*ALL)
    launchers.put_sign(f"fail-0-{failing}")
    assert launchers.exit_codes(30) == dict.fromkeys(ALL, 7)
    for rank in ALL:
        assert f"rank {failing} of 3" in launchers.stderr_of(rank)
        assert "exit code 7" in launchers.stderr_of(rank)


def test_a_restart_is_one_of_the_whole_job(launchers):
    launchers.start_all(*AGAIN)
    launchers.wait_ready(*ALL)
    launchers.put_sign("fail-0-2")
    reported = launchers.wait_ready(*ALL, attempt=1)
    launchers.put_sign("end-1")
    assert launchers.exit_codes() == dict.fromkeys(ALL, 0)
    assert {each["TORCHELASTIC_RESTART_COUNT"] for each in reported} == {"1"}


@pytest.mark.parametrize(
    ("number", "code", "at_once"),
    [(signal.SIGTERM, 143, True), (signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)],
    ids=["TERM to all", "INT to all", "TERM to one"],
)
def test_a_signal_stops_the_job(launchers, number, code, at_once):
    launchers.start_all(*SHORT)
    launchers.wait_ready(*ALL)
    for rank in ALL if at_once else (2,):
        launchers.by_rank[rank].send_signal(number)
    assert launchers.exit_codes() == dict.fromkeys(ALL, code)
    assert not any("killing" in launchers.stderr_of(rank) for rank in ALL)


def test_a_second_ctrl_c_at_a_joined_launcher_kills(launchers):
    launchers.start_all("--grace", "60", words=("ignore-signals",))
    launchers.wait_ready(*ALL)
    launchers.by_rank[1].send_signal(signal.SIGINT)
    launchers.by_rank[0].wait_stderr("SIGINT")
    with contextlib.suppress(subprocess.TimeoutExpired):  # two that come at once count as one
        launchers.by_rank[1].process.wait(1.0)
    launchers.by_rank[1].send_signal(signal.SIGINT)
    assert launchers.exit_codes(30) == dict.fromkeys(ALL, 130)


def test_usr1_that_all_launchers_get_comes_once_to_each_worker(launchers):
    launchers.start_all()
    launchers.wait_ready(*ALL)
    for rank in ALL:
        launchers.by_rank[rank].send_signal(signal.SIGUSR1)
    signs = [launchers.hosts.work / f"usr1-{rank}" for rank in ALL]
    launchers.by_rank[0].wait_for(lambda: all(sign.exists() for sign in signs), "USR1 everywhere")
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == dict.fromkeys(ALL, 0)
    assert [sign.read_text() for sign in signs] == ["."] * 3


# --- what is lost


def test_a_killed_joined_launcher_ends_the_job(launchers):
    launchers.start_all(*SHORT, words=("ignore-signals",))
    launchers.wait_ready(*ALL)
    launchers.by_rank[2].send_signal(signal.SIGKILL)
    assert launchers.exit_codes(30) == {0: UNAVAILABLE, 1: UNAVAILABLE, 2: -9}
    for rank in (0, 1):
        assert "n3" in launchers.stderr_of(rank)
        assert "lost" in launchers.stderr_of(rank)


def test_a_killed_coordinator_ends_the_job_where_no_restart_is_left(launchers):
    launchers.start_all(*SHORT, words=("ignore-signals",))
    launchers.wait_ready(*ALL)
    launchers.by_rank[0].send_signal(signal.SIGKILL)
    assert launchers.exit_codes(30) == {0: -9, 1: UNAVAILABLE, 2: UNAVAILABLE}
    for rank in (1, 2):
        assert "node 0" in launchers.stderr_of(rank)


def test_a_coordinator_that_comes_back_goes_on_with_the_same_launchers(launchers):
    launchers.start_all(*AGAIN)
    launchers.wait_ready(*ALL)
    launchers.by_rank[0].send_signal(signal.SIGKILL)
    launchers.by_rank[0].wait()
    launchers.start(0, *AGAIN)
    reported = launchers.wait_ready(*ALL, attempt=1)
    launchers.put_sign("end-1")
    assert launchers.exit_codes() == dict.fromkeys(ALL, 0)
    assert {each["TORCHELASTIC_RESTART_COUNT"] for each in reported} == {"1"}


def test_a_coordinator_that_does_not_come_back_is_waited_for_and_named(launchers):
    launchers.start_all(*AGAIN, "--join-timeout", "3")
    launchers.wait_ready(*ALL)
    launchers.by_rank[0].send_signal(signal.SIGKILL)
    assert launchers.exit_codes() == {0: -9, 1: UNAVAILABLE, 2: UNAVAILABLE}
    for rank in (1, 2):
        assert "node 0" in launchers.stderr_of(rank)


@pytest.mark.parametrize("which", [0, 2], ids=["the coordinator", "a peer"])
def test_a_host_that_is_cut_off_ends_the_job_on_both_sides(launchers, which):
    launchers.start_all(*SHORT)
    launchers.wait_ready(*ALL)
    faults.cut(launchers.hosts, f"n{which + 1}")
    assert launchers.exit_codes(60) == dict.fromkeys(ALL, UNAVAILABLE)


def test_a_host_that_is_powered_off_ends_the_job(launchers):
    launchers.start_all(*SHORT)
    launchers.wait_ready(*ALL)
    faults.power_off(launchers.hosts, "n3")
    assert launchers.exit_codes(60) == {0: UNAVAILABLE, 1: UNAVAILABLE, 2: -9}
    assert "n3" in launchers.stderr_of(1)


def test_an_elastic_job_goes_on_without_a_powered_off_host_and_takes_it_in_again(launchers):
    launchers.start_all(*AGAIN, size="2:3")
    first = launchers.wait_ready(*ALL)
    faults.power_off(launchers.hosts, "n2")
    launchers.by_rank.pop(1).wait()
    reported = launchers.wait_ready(0, 1, attempt=1)
    assert [each["host"] for each in reported] == ["n1", "n3"]
    assert {each["WORLD_SIZE"] for each in reported} == {"2"}
    faults.power_on(launchers.hosts, "n2")
    launchers.start(1, *AGAIN, size="2:3")
    launchers.by_rank[0].wait_stderr("may take part from the next attempt on")
    launchers.put_sign("fail-1-1")
    reported = launchers.wait_ready(*ALL, attempt=2)
    launchers.put_sign("end-2")
    assert launchers.exit_codes() == dict.fromkeys(ALL, 0)
    assert [each["host"] for each in reported] == ["n1", "n2", "n3"]
    assert not {each["pid"] for each in first} & {each["pid"] for each in reported}


def test_an_elastic_job_goes_on_without_a_launcher_that_was_asked_to_end(launchers):
    """As on a pod of a drained node."""
    launchers.start_all(*AGAIN, size="2:3")
    launchers.wait_ready(*ALL)
    drained = launchers.by_rank.pop(1)
    drained.send_signal(signal.SIGTERM)
    assert drained.wait().returncode == 128 + signal.SIGTERM
    assert mentions(drained.stderr, "SIGTERM", "leaving")
    reported = launchers.wait_ready(0, 1, attempt=1)
    assert [each["host"] for each in reported] == ["n1", "n3"]
    launchers.put_sign("end-1")
    assert launchers.exit_codes() == {0: 0, 2: 0}
    assert "SIGTERM" in launchers.stderr_of(0)


def test_a_pod_that_is_replaced_joins_from_its_new_address(launchers):
    launchers.start_all(*AGAIN)
    launchers.wait_ready(*ALL)
    stay = [launchers.by_rank[rank].pid for rank in (0, 2)]
    launchers.by_rank[1].send_signal(signal.SIGKILL)
    launchers.by_rank[1].wait()
    launchers.start(1, *AGAIN, host="n4")
    reported = launchers.wait_ready(*ALL, attempt=1)
    assert [each["host"] for each in reported] == ["n1", "n4", "n3"]
    assert [launchers.by_rank[rank].pid for rank in (0, 2)] == stay
    assert [launchers.by_rank[rank].process.poll() for rank in (0, 2)] == [None, None]
    launchers.put_sign("end-1")
    assert launchers.exit_codes() == dict.fromkeys(ALL, 0)


def test_a_pod_whose_host_vanished_is_replaced_on_another(launchers):
    launchers.start_all(*AGAIN)
    launchers.wait_ready(*ALL)
    faults.power_off(launchers.hosts, "n2")
    launchers.by_rank[1].wait()
    launchers.start(1, *AGAIN, host="n4")
    reported = launchers.wait_ready(*ALL, attempt=1)
    launchers.put_sign("end-1")
    assert launchers.exit_codes() == dict.fromkeys(ALL, 0)
    assert [each["host"] for each in reported] == ["n1", "n4", "n3"]


# --- named by a system


def test_nodes_of_aws_batch_have_the_rendezvous_on_the_main_node_with_rank_0(launchers):
    address = launchers.hosts.address("n2")
    for index in (0, 2, 1):
        env = {
            "SIGN_DIR": str(launchers.hosts.work),
            "AWS_BATCH_JOB_ID": f"ad4a2e73#{index}",
            "AWS_BATCH_JOB_NODE_INDEX": str(index),
            "AWS_BATCH_JOB_NUM_NODES": "3",
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
        }
        if index != 1:
            env["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = address
        words = ["train", "--procs-per-node", "1", "--device", "cpu", "--format", "plain", PROGRAM]
        launchers.by_rank[index] = launchers.hosts.start(words, host=f"n{index + 1}", env=env)
    reported = launchers.wait_ready(0, 1, 2)
    launchers.put_sign("end-0")
    assert launchers.exit_codes() == dict.fromkeys(range(3), 0)
    assert [each["host"] for each in reported] == ["n2", "n1", "n3"]
    assert {each["MASTER_ADDR"] for each in reported} == {address}
    assert {each["DISTLAUNCH_JOB_ID"] for each in reported} == {"ad4a2e73"}
