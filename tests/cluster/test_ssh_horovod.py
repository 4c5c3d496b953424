"""The real Horovod over hosts with unequal slots: ranks, store, and horovodrun's options."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.facts import mentions
from tests.launcher import PROGRAMS, TRAINING

# Building Horovod takes up to a quarter of an hour, once.
pytestmark = pytest.mark.timeout(2400)

OPS, DIGITS = (PROGRAMS / "frameworks" / f"horovod_{name}.py" for name in ("ops", "digits"))
PATIENT = ("-x", "HOROVOD_GLOO_TIMEOUT_SECONDS=150", "-x", "OMP_NUM_THREADS=1")
PATIENCE_S = 200
BATCH = 96
"""Of all workers together."""


@pytest.fixture(scope="module")
def python(horovod_python) -> str:
    return horovod_python


def reported(result, workers: int) -> list[dict]:
    """Return the reports of the workers, by rank."""
    assert result.returncode == 0, result.stderr
    return [json.loads(result.lines_of(rank)[-1]) for rank in range(workers)]


def test_unequal_hosts(hosts, python):
    """n1 has one worker, n2 three, n3 two: two workers have local rank 1, one has local rank 2."""
    words = (
        "--hosts",
        "n1:1,n2:3,n3:2",
        "--device",
        "cpu",
        "--backend",
        "horovod",
        "--python",
        python,
        *PATIENT,
    )
    found = reported(hosts.train(*words, OPS, timeout=PATIENCE_S), 6)
    assert [each["place"] for each in found] == [
        [0, 6, 0, 1, 0, 3],
        [1, 6, 0, 3, 1, 3],
        [2, 6, 1, 3, 0, 2],
        [3, 6, 2, 3, 0, 1],
        [4, 6, 0, 2, 2, 3],
        [5, 6, 1, 2, 1, 2],
    ]
    assert [each["sum 2"] for each in found] == [15 + 12] * 6
    firsts, others = 0 + 1 + 4, 2 + 3 + 5
    assert [each["of my set"] for each in found] == [firsts, firsts, others, others, firsts, others]
    assert all(each["same weights"] and each["large"] == 6 for each in found)


@pytest.mark.parametrize("network", ["--networks=2 --docker", "--no-names"])
def test_networks_that_are_not_plain(make_hosts, python, network):
    hosts = make_hosts(2, *network.split())
    words = ("--hosts", "n1:1,n2:2", "--device", "cpu", "--backend", "horovod", "--python", python)
    found = reported(hosts.train(*words, *PATIENT, OPS, timeout=PATIENCE_S), 3)
    assert [each["large"] for each in found] == [3, 3, 3]


@pytest.mark.parametrize(
    ("network", "says"),
    [
        # Horovod's client takes an address to end at the first colon.
        ("--ipv6-only", "Horovod's workers connect by IPv4 only, but n1 has only fd"),
        # Its process sets, the one of all workers too, listen where the own name leads, whatever
        # the interface is.
        (
            "--own-name-is-loopback=n2",
            "n2: the machine's own name resolves to 127.0.1.1, where other nodes",
        ),
    ],
)
def test_unsupported_features_of_horovod_are_reported_before_anything_runs(
    make_hosts, network, says
):
    words = (
        "--hosts",
        "n1:1,n2:1",
        "--device",
        "cpu",
        "--backend",
        "horovod",
        "--no-python",
        "true",
    )
    result = make_hosts(2, network).train(*words)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_command_line_of_horovodrun_fills_one_host_after_the_other(hosts, python):
    words = ["-np", "3", "-H", "n1:2,n2:2", "--device", "cpu", "--start-timeout", "60", *PATIENT]
    running = hosts.start(["horovodrun", *words, python, OPS])
    found = reported(running.wait(PATIENCE_S), 3)
    assert [each["place"] for each in found] == [
        [0, 3, 0, 2, 0, 2],
        [1, 3, 1, 2, 0, 1],
        [2, 3, 0, 1, 1, 2],
    ]


def losses(lines: list[str]) -> dict[str, float]:
    return {
        step: float(loss)
        for step, loss in re.findall(r"^loss (\S+) (\S+)$", "\n".join(lines), re.MULTILINE)
    }


def test_a_training_goes_on_after_a_failure_on_another_host(hosts, python):
    alone = subprocess.run(
        [python, DIGITS, str(BATCH), "-", "-1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    words = (
        "--hosts",
        "n1:2,n2:1",
        "--device",
        "cpu",
        "--backend",
        "horovod",
        "--preload",
        f"horovod.torch,{TRAINING},sklearn.datasets",
        *PATIENT,
    )
    again = ("--max-restarts", "1", "--min-uptime", "0")
    script = (DIGITS, str(BATCH // 3), hosts.work / "checkpoint", "3")
    result = hosts.train(*words, *again, *script, timeout=PATIENCE_S, python=python)
    assert result.returncode == 0, result.stderr
    assert mentions(result.stderr, "attempt 0", "rank 2 on n2: RuntimeError: as it was told to")
    wanted = losses(alone.stdout.splitlines())
    for attempt in (0, 1):
        lines = (result.run_dir / f"attempt-{attempt}" / "rank-0.log").read_text().splitlines()
        epochs = [epoch for epoch in range(8) if (epoch < 3) == (attempt == 0)]
        assert losses(lines) == pytest.approx(
            {step: loss for step, loss in wanted.items() if int(step[0]) in epochs},
            rel=1e-2,
            abs=2e-3,
        )
        if attempt:
            assert lines[-1].startswith("accuracy 0.9")
