"""Workers and other programs that obstruct the launcher: pipes for files, a stopped guard, patterns
for pkill."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.process.conftest import spawner_below, until

HOLD = """
import os, signal, sys, time
sys.path.insert(0, os.environ["PROGRAMS"])
import survivor
survivor.hold()
RANK = int(os.environ["RANK"])
ATTEMPT = os.environ["DISTLAUNCH_RUN_DIR"] + "/attempt-0"
"""
PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.fixture
def program(distlaunch):
    def write(source: str) -> str:
        (distlaunch.work / "worker.py").write_text(HOLD + source)
        return "worker.py"

    distlaunch.env["PROGRAMS"] = str(PROGRAMS)
    return write


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def spawner_of(launcher: int) -> int:
    return until(lambda: spawner_below(launcher), "the spawner")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ('os.environ["TORCHELASTIC_ERROR_FILE"]', 3),
        ('ATTEMPT + "/rank-0.log"', 3),
        ('os.environ["DISTLAUNCH_RUN_DIR"] + "/report.txt"', 3),
    ],
)
def test_a_pipe_in_place_of_one_of_our_files_keeps_nobody(distlaunch, program, name, code):
    result = distlaunch.train(
        "--num-procs",
        "2",
        program(
            f"if RANK == 0:\n    os.mkfifo({name})\n    print('x')\n    sys.exit(3)\ntime.sleep(600)"
        ),
    )
    assert result.returncode == code
    assert "rank 0 of 2 failed: exit code 3" in result.stderr
    distlaunch.assert_no_survivors()


def test_a_link_in_place_of_the_report_is_not_followed(distlaunch, program):
    (distlaunch.work / "thesis.txt").write_text("mine")
    source = "os.symlink(os.path.abspath('thesis.txt'), os.environ['DISTLAUNCH_RUN_DIR'] + '/report.txt')\nsys.exit(3)"
    result = distlaunch.train("--num-procs", "1", program(source))
    assert (distlaunch.work / "thesis.txt").read_text() == "mine"
    assert "exit code 3" in (result.run_dir / "report.txt").read_text()


@pytest.fixture
def waiting(distlaunch, program):
    running = distlaunch.start(
        [
            "train",
            "--num-procs",
            "2",
            "--failure-grace",
            "1",
            program("print('up', flush=True)\ntime.sleep(600)"),
        ]
    )
    running.wait_rank_logs("up", 2)
    return running


def test_a_stopped_spawner_is_woken_to_do_its_work(distlaunch, waiting):
    os.kill(spawner_of(waiting.pid), signal.SIGSTOP)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait().returncode == 143
    distlaunch.assert_no_survivors()


def test_a_stopped_spawner_wakes_when_the_launcher_is_killed(distlaunch, waiting):
    os.kill(spawner_of(waiting.pid), signal.SIGSTOP)
    waiting.send_signal(signal.SIGKILL)
    waiting.process.wait()
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("pattern", ["distlaunch", "python", r"worker\.py"])
def test_no_pattern_for_the_launcher_or_its_workers_hits_their_guard(waiting, pattern):
    spawner = spawner_of(waiting.pid)
    assert not re.search(pattern, cmdline(spawner))
    assert not re.search(pattern, Path(f"/proc/{spawner}/comm").read_text())
    assert re.search(pattern, cmdline(waiting.pid))


def test_a_huge_env_file_is_refused_not_cut(distlaunch, program):
    (distlaunch.work / "big.env").write_text("# padding\n" * 500_000 + "LAST=value\n")
    result = distlaunch.train("--num-procs", "1", "--env-file", "big.env", program("pass"))
    assert (result.returncode, result.run_dir) == (2, None)
    assert "big.env" in result.stderr


@pytest.mark.parametrize("job_id", ["latest", "-x", "é" * 60])
def test_an_id_that_makes_no_good_folder_is_refused(distlaunch, program, job_id):
    result = distlaunch.train("--num-procs", "1", f"--job-id={job_id}", program("pass"))
    assert (result.returncode, result.run_dir) == (2, None)
