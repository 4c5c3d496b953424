"""A short form of ``scripts/chaos --hosts 4 --faults 200``, with fixed choices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "scripts" / "chaos"
FAULTS = 8


@pytest.mark.timeout(400)
def test_a_job_over_hosts_ends_as_promised_and_leaves_nothing_for_any_fault(make_hosts):
    make_hosts(1).close()  # skips where there can be none
    done = subprocess.run(
        [
            *(sys.executable, CHAOS, "--hosts", "4", "--faults", str(FAULTS), "--beds", "4"),
            *("--seed", "7"),
        ],
        env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{FAULTS} of {FAULTS} faults" in done.stdout
