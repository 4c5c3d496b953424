"""The launcher ends while it connects, and what it has started for that waits for a network that
does not answer."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"

HANGS = """\
#!/bin/sh
exec {python} -c '
import sys, time
sys.path.insert(0, "{programs}")
import survivor
survivor.hold()
open("hangs", "a").write("x")
time.sleep(3600)'
"""


@pytest.fixture(params=["--ssh-command", "ProxyCommand", "Match exec"])
def connecting(request, distlaunch, tmp_path):
    """Start a launcher that connects to two nodes by a program that never ends."""
    hangs = tmp_path / "hangs.sh"
    hangs.write_text(HANGS.format(python=sys.executable, programs=PROGRAMS))
    hangs.chmod(0o755)
    config = tmp_path / "config"
    lines = {
        "--ssh-command": "",
        "ProxyCommand": f"Host *\n ProxyCommand {hangs} %h\n",
        "Match exec": f'Match exec "{hangs}"\n User somebody\n',
    }
    config.write_text(lines[request.param])
    words = ["train", "--hosts", "n1:1,n2:1", "--ssh-config", config, "--format", "plain"]
    if request.param == "--ssh-command":
        words += ["--ssh-command", str(hangs)]
    running = distlaunch.start([*words, "no-script.py"])
    started = distlaunch.work / "hangs"
    running.wait_for(
        lambda: started.exists() and len(started.read_text()) == 2, "both connects to be under way"
    )
    return running


@pytest.mark.parametrize("name", ["INT", "TERM", "KILL"])
def test_nothing_that_carries_bytes_outlives_the_launcher(connecting, distlaunch, name):
    number = getattr(signal, f"SIG{name}")
    connecting.send_signal(number)
    result = connecting.wait()
    assert result.returncode == (-number if name == "KILL" else 128 + number)
    distlaunch.assert_no_survivors()
