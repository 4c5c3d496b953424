"""Jobs over several hosts that go on without some of them: elastic ones, spares, returning hosts,
--discover."""

from __future__ import annotations

import json
import time

import pytest

from tests.cluster.hosts import faults
from tests.cluster.stepping import AGENT, Stepping, beside, wait_empty
from tests.facts import mentions

FOUR = "n1:1,n2:1,n3:1,n4:1"
ELASTIC = ("--num-nodes", "3:4")
RESTARTS = ("--max-restarts", "3", "--min-uptime", "0")
UNAVAILABLE = 69


def begun(hosts, *options, nodes=FOUR, **more):
    job = Stepping(hosts, nodes, *options, **more)
    job.up()
    job.goes_on()
    return job


def lose(hosts, host, how):
    match how:
        case "sessions":
            faults.kill_sessions(hosts, host)
        case "cut":
            faults.cut(hosts, host)
        case "off":
            faults.power_off(hosts, host)


def assert_places(reported, *on):
    """Check that ranks are contiguous on just these hosts, in this order."""
    size = str(len(on))
    assert [each["host"] for each in reported] == list(on)
    assert [each["RANK"] for each in reported] == [str(rank) for rank in range(len(on))]
    assert [each["NODE_RANK"] for each in reported] == [str(rank) for rank in range(len(on))]
    assert {(each["WORLD_SIZE"], each["GROUP_WORLD_SIZE"]) for each in reported} == {(size, size)}


def assert_filed(result, *sizes):
    """Check that each attempt of these sizes has its own workers' output, and no other's."""
    for attempt, size in enumerate(sizes):
        logs = sorted((result.run_dir / f"attempt-{attempt}").glob("rank-*.log"))
        assert [path.name for path in logs] == [f"rank-{rank}.log" for rank in range(size)]
        for path in logs:
            [line] = path.read_text().splitlines()
            assert line.startswith(f"attempt {attempt} of {size} workers is up")


@pytest.mark.parametrize(
    ("how", "words"),
    [("sessions", ()), ("cut", ("ignore-signals",)), ("off", ())],
    ids=["sessions", "cut, workers that ignore signals", "power off"],
)
def test_a_job_goes_on_without_a_host_that_it_lost(hosts, how, words):
    job = begun(hosts, *ELASTIC, words=words)
    before = job.step
    lose(hosts, "n4", how)
    reported = job.up(1)
    assert_places(reported, "n1", "n2", "n3")
    assert int(reported[0]["step"]) >= before
    job.goes_on()
    if how != "off":
        wait_empty(hosts, "n4", within_s=20)
    else:
        faults.power_on(hosts, "n4")
    faults.cut(hosts, "n4", on=False)
    result = job.enough()
    assert_filed(result, 4, 3)
    assert "node n4 (rank 3) left: " in result.stderr
    assert mentions(result.stderr, "3 of 4")
    assert mentions(result.stderr, "succeeded", "attempt 1", "1 lost")
    assert "restart 1" not in result.stderr
    hosts.assert_clean()


def test_the_first_host_may_be_lost_as_well(hosts):
    job = begun(hosts, *ELASTIC)
    faults.kill_sessions(hosts, "n1")
    reported = job.up(1)
    assert_places(reported, "n2", "n3", "n4")
    assert {each["MASTER_ADDR"] for each in reported} == {hosts.address("n2")}
    assert_filed(job.enough(), 4, 3)


def test_a_lost_host_joins_at_the_next_attempt(hosts):
    job = begun(hosts, *ELASTIC, *RESTARTS)
    faults.kill_sessions(hosts, "n4")
    assert_places(job.up(1), "n1", "n2", "n3")
    job.running.wait_stderr(
        "node n4 is back, and may take part from the next attempt on", timeout=60
    )
    job.goes_on()
    job.fail()
    assert_places(job.up(2), "n1", "n2", "n3", "n4")
    job.goes_on()
    job.enough()


def test_another_job_stays_as_it_is_while_one_re_forms(hosts):
    with beside(hosts, "n1:1,n2:1"):
        job = begun(hosts, *ELASTIC)
        faults.kill_sessions(hosts, "n4")
        assert_places(job.up(1), "n1", "n2", "n3")
        job.goes_on()
        job.enough()


def test_too_few_hosts_end_the_job_and_are_named(hosts):
    job = begun(hosts, *ELASTIC, "--join-timeout", "4")
    faults.kill_sshd(hosts, "n3")
    faults.kill_sshd(hosts, "n4")
    result = job.running.wait()
    assert result.returncode == UNAVAILABLE, result.stderr
    assert mentions(result.stderr, "2 of", "3 nodes")
    table = result.stderr.partition("2 of at least 3")[2].splitlines()
    # On a slow machine the time may be up before they have been tried again.
    lost = [line for line in table if "connection refused" in line or "and not back" in line]
    assert [line.split()[0] for line in lost if " connect " in line] == ["n3", "n4"], result.stderr
    hosts.assert_clean()


def test_a_spare_stands_in_at_once(hosts):
    job = begun(hosts, "--spares", "1")
    assert_places(job.up(), "n1", "n2", "n3")
    faults.kill_sessions(hosts, "n2")
    assert_places(job.up(1), "n1", "n3", "n4")
    job.goes_on()
    job.enough()


def test_hosts_are_discovered_as_they_come_and_go(hosts):
    listing = hosts.work / "hosts"
    listing.write_text("n1:1\nn2:1\n")
    job = begun(hosts, "--discover", f"cat {listing}", "--num-nodes", "1:4", *RESTARTS, nodes="")
    assert_places(job.up(), "n1", "n2")
    listing.write_text("n3:1\nn1:1\nn4:1\n")
    job.fail()
    reported = job.up(1)
    assert sorted(each["host"] for each in reported) == ["n1", "n3", "n4"]
    wait_empty(hosts, "n2")
    job.goes_on()
    job.enough()


def test_a_fixed_job_waits_for_the_host_that_it_lost(hosts):
    job = begun(hosts, *RESTARTS, nodes="n1:1,n2:1,n3:1")
    faults.kill_sshd(hosts, "n2")
    job.running.wait_stderr("restart 1 of 3")
    wait_empty(hosts, "n2")
    faults.start_sshd(hosts, "n2")
    assert_places(job.up(1), "n1", "n2", "n3")
    job.goes_on()
    job.enough()


def test_a_fixed_job_ends_if_the_host_that_it_lost_stays_away(hosts):
    job = begun(hosts, *RESTARTS, "--join-timeout", "6", nodes="n1:1,n2:1,n3:1")
    faults.kill_sshd(hosts, "n2")
    result = job.running.wait()
    assert result.returncode == UNAVAILABLE, result.stderr
    assert mentions(result.stderr, "error", "1 of 3")
    rows = [line.split()[:4] for line in result.stderr.splitlines()]
    assert ["n2", f"{hosts.address('n2')}:22", "root", "connect"] in rows
    hosts.assert_clean()


def test_a_host_that_was_only_slow_is_not_split_off_for_ever(hosts):
    job = begun(hosts, *ELASTIC, *RESTARTS)
    faults.pause(hosts, "n4")
    assert_places(job.up(1), "n1", "n2", "n3")
    faults.resume(hosts, "n4")
    job.running.wait_stderr(
        "node n4 is back, and may take part from the next attempt on", timeout=60
    )
    job.fail()
    assert_places(job.up(2), "n1", "n2", "n3", "n4")
    job.enough()


def test_a_host_that_is_lost_again_and_again_is_left_alone_for_a_while(hosts):
    job = begun(hosts, *ELASTIC, "--max-restarts", "9", "--min-uptime", "0")
    for loss in range(1, 4):
        job.kill("n4", AGENT)
        job.running.wait_event("node_lost", count=loss)
        attempt = job.wait_attempt(["n1", "n2", "n3"], after=2 * loss - 2)
        if loss < 3:
            job.running.wait_event("node_joined", count=4 + loss)
            job.fail()
            job.wait_attempt(["n1", "n2", "n3", "n4"], after=attempt)
    job.running.wait_stderr("node n4 was lost 3 times within 10 min: not used for 60 s")
    job.goes_on()
    job.enough()
    hosts.assert_clean()


def test_losses_are_recorded_once_with_ranks_and_reason(hosts):
    job = begun(hosts, *ELASTIC)
    faults.kill_sessions(hosts, "n4")
    job.up(1)
    [lost] = job.enough().of_type("node_lost")
    assert (lost["host"], lost["ranks"], lost["attempt"]) == ("n4", [3], 0)
    assert mentions(lost["why"], "connection", "closed")
    plans = [
        json.loads((job.running.run_dir / f"plan-{attempt}.json").read_text()) for attempt in (0, 1)
    ]
    assert [plan["world_size"] for plan in plans] == [4, 3]


def test_a_cut_shorter_than_silence_re_forms_nothing(hosts):
    job = begun(hosts, *ELASTIC)
    for name in ("n2", "n4"):
        faults.cut(hosts, name)
        time.sleep(2)  # that long it lasts
        faults.cut(hosts, name, on=False)
    job.goes_on()
    result = job.enough()
    assert not result.of_type("node_lost")
    assert not (job.folder / "attempt-1").exists()
