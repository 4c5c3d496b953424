"""scripts/explain-scores scores a folder of programs by what their headers expect."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
CORPUS = SCRIPTS / "failing_programs"

FAILS = """# workers: 2
# expect-rank: 1
# expect-exit: 1
# expect-cause: no such layer | no layer
# expect-frame: build
# misleads: layer 9
import os, time

def build():
    raise KeyError("no such layer 9")

if os.environ["RANK"] == "1":
    build()
time.sleep(20)
"""
HANGS = """# workers: 2
# hang-timeout: 2
# expect-rank: 0
# expect-cause: wait_for_file
import os, time

def wait_for_file():
    time.sleep(60)

if os.environ["RANK"] == "0":
    wait_for_file()
"""


@pytest.fixture(scope="module")
def corpus():
    """Return the module explainlib.corpus."""
    return runpy.run_path(str(SCRIPTS / "explainlib" / "corpus.py"))


def test_folder_is_scored(tmp_path):
    (tmp_path / "programs" / "hangs").mkdir(parents=True)
    (tmp_path / "programs" / "fails.py").write_text(FAILS, encoding="utf-8")
    (tmp_path / "programs" / "hangs" / "waits.py").write_text(HANGS, encoding="utf-8")
    command = [sys.executable, str(SCRIPTS / "explain-scores"), str(tmp_path / "programs")]
    command += ["--json", str(tmp_path / "scores.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1, done.stderr
    results = json.loads((tmp_path / "scores.json").read_text("utf-8"))
    fails = results["programs"]["fails"]
    assert (fails["rank"], fails["cause"], fails["frame"], fails["exit"]) == (True,) * 4
    assert fails["misled"], "a text that misleads is in the headline"
    assert results["failures"]["both"] == 1
    assert results["failures"]["misled"] == 1
    assert results["hangs"]["programs"] == 1
    assert results["programs"]["hangs/waits"]["cause"]


def test_line_of_another_rank_is_not_the_cause(corpus, tmp_path):
    path = tmp_path / "fails.py"
    path.write_text(FAILS, encoding="utf-8")
    program = corpus["read_programs"](tmp_path)[0]
    report = "rank 0 of 2 failed: exit code 1\n  EOFError\n  rank 1: KeyError: no such layer 9\n"
    record = {"ranks": [0], "summary": "exit code 1", "hint": None}
    wrong = corpus["judge"](program, record, report.replace("rank 1:", "rank 0:"), 1)
    assert (wrong.rank, wrong.cause, wrong.misled) == (False, False, True)
    right = corpus["judge"](program, record, report.replace("rank 0 of", "rank 1 of"), 1)
    assert (right.rank, right.cause, right.both, right.misled) == (True, True, True, False)


def test_corpus_has_failures_and_hangs(corpus):
    programs = corpus["read_programs"](CORPUS)
    assert sum(not program.hangs for program in programs) >= 60
    assert sum(program.hangs for program in programs) >= 10
    for program in programs:
        assert program.blamed <= set(range(program.workers)), program.name
        assert program.header["expect-cause"], program.name
