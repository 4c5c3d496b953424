"""``train --detach`` in a login by SSH that ends, and ``attach`` and ``wait`` in others."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import HEAD, faults, until
from tests.cluster.stepping import SHORT, STEPS
from tests.facts import mentions

LONG_S = 60.0
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(240)


def login(hosts, host: str, command: str) -> str:
    """Type a command in a terminal on a host, and log out."""
    variables = {"XDG_STATE_HOME": hosts.env["XDG_STATE_HOME"], "PYTHONPATH": str(ROOT)}
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    line = f"cd {shlex.quote(str(hosts.work))} && env {words} {command}"
    ssh = ["ssh", "-F", hosts.ssh_config, "-tt", host, line]
    return hosts.run(HEAD, *ssh, timeout_s=LONG_S).stdout


def reports(folder: Path, attempt: int) -> list[str]:
    """Return the hosts of an attempt's workers, by rank."""
    files = [path for path in folder.glob(f"attempt-{attempt}/*") if path.suffix != ".new"]
    files.sort(key=lambda path: int(path.name))
    return [json.loads(path.read_text())["host"] for path in files]


def test_a_job_outlives_the_login_that_started_it_and_a_host_that_is_cut_off(hosts):
    folder = hosts.work / "job"
    folder.mkdir()
    train = [sys.executable, "-m", "distlaunch", "train", "--detach", "--job-id", "exp"]
    train += ["--hosts", "n1:1,n2:1,n3:1,n4:1", "--num-nodes", "3:4", "--device", "cpu", *SHORT]
    shown = login(hosts, "n1", f"SIGN_DIR={folder} {shlex.join(map(str, [*train, STEPS]))}")
    assert shown.splitlines()[-1] == "exp"
    until(lambda: len(reports(folder, 0)) == 4, "all workers", LONG_S)
    assert reports(folder, 0) == ["n1", "n2", "n3", "n4"]

    # The login is over. The launcher runs on, on n1.
    [launcher] = [each for each in hosts.processes("n1") if "--detach" in each.argv]
    attached = hosts.start(["attach", "exp"], host="n1")
    attached.wait_stdout("is up")
    faults.cut(hosts, "n4")
    until(lambda: len(reports(folder, 1)) == 3, "an attempt without n4", LONG_S)
    attached.wait_stdout("attempt 1 of 3 workers is up", timeout=LONG_S)
    faults.cut(hosts, "n4", on=False)
    assert launcher.pid in {each.pid for each in hosts.processes("n1")}

    waiting = hosts.start(["wait", "exp"], host="n1")
    (folder / "enough").touch()
    assert waiting.wait(LONG_S).returncode == 0
    seen = attached.wait(LONG_S)
    assert seen.returncode == 0
    assert mentions(seen.stdout, "node n4", "left")

    # On another host that sees the run directory.
    other = hosts.start(["attach", "exp"], host="n2").wait(LONG_S)
    assert (other.returncode, other.stdout.splitlines()[-1]) == (
        0,
        seen.stdout.splitlines()[-1],
    )
    hosts.assert_clean()
