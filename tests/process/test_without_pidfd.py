"""Supervision if the kernel refuses pidfds: the same tests under a seccomp filter that all
launchers inherit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILTER = HERE.parent / "programs" / "without_pidfd.py"


def under_the_filter(*words: str | os.PathLike[str], **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FILTER, sys.executable, *words]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )


def test_the_filter_does_refuse_them():
    ask = "import os, signal\nfor call in (lambda: os.pidfd_open(os.getpid()), lambda: signal.pidfd_send_signal(0, 0)):\n try: call()\n except OSError as exc: print(exc.errno)"
    assert under_the_filter("-c", ask, timeout=30).stdout == "38\n38\n"


CHOSEN = {
    "test_supervision": "failure_grace or killed or 0_give_0 or stopped",
    "test_signals": "second or grace or data_loader or usr1 or continued or whole_group",
    "test_nothing_left": "not random and (clean_daemon or ignores_term or hopping)",
    "test_restarts": "waits_until or goes_well",
}
"""Tests that wait for processes or signal them, by module: a selection for ``pytest -k``."""


@pytest.mark.timeout(400)
def test_the_tests_pass_where_pidfds_are_refused(tmp_path):
    selection = " or ".join(f"({module} and ({chosen}))" for module, chosen in CHOSEN.items())
    done = under_the_filter(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "inner"),
        *("-k", selection, *(HERE / f"{module}.py" for module in CHOSEN)),
        cwd=HERE.parents[1],
        timeout=390,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 40, "each selects some"
