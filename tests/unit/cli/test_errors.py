"""The exit of the process after an error, with any standard streams."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch.cli.error_output import guarded, print_warnings
from distlaunch.core.errors import LaunchError
from tests.facts import mentions


def run_guarded(
    code: str, tmp_path: Path, *, unbuffered: str = "", **popen
) -> subprocess.CompletedProcess[str]:
    """Run ``guarded(work)`` in a process of its own, where ``code`` defines ``work``."""
    source = f"import sys\nfrom distlaunch.cli.error_output import guarded\n{code}\nsys.exit(guarded(work))\n"
    return subprocess.run(
        [sys.executable, "-c", source],
        env={"PATH": os.defpath, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=60,
        **popen,
    )


def test_a_handled_error_is_two_lines_and_its_own_code(capsys):
    def work() -> int:
        raise LaunchError("no n3", hint="start sshd\non it")

    assert guarded(work) == 70
    captured = capsys.readouterr()
    assert captured.err == "distlaunch: error: no n3\n  hint: start sshd\n  on it\n"
    assert captured.out == ""


def test_cursor_movements_are_escaped_in_an_error(capsys):
    def work() -> int:
        raise LaunchError("a\x1b[2J\x9b\udcff\rü", hint="\x07")

    guarded(work)
    assert capsys.readouterr().err == "distlaunch: error: a\\x1b[2J\\x9b\\xff\\rü\n  hint: \\x07\n"


def test_ctrl_c_is_answered_quietly(capsys):
    def work() -> int:
        raise KeyboardInterrupt

    assert guarded(work) == 130
    assert capsys.readouterr() == ("", "")


def test_a_fault_of_ours_is_one_line_and_a_private_file_with_the_traceback(tmp_path):
    done = run_guarded("def work():\n    raise ValueError('odd\\nmore')", tmp_path)
    (saved,) = tmp_path.iterdir()
    assert done.returncode == 70
    first, second = done.stderr.splitlines()
    assert first.endswith("ValueError: odd")
    assert second.endswith(str(saved))
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert "Traceback" in saved.read_text()
    assert "ValueError: odd\nmore" in saved.read_text()


def test_a_fault_whose_traceback_cannot_be_saved_names_its_place_in_one_line(tmp_path):
    code = "import tempfile\ntempfile.tempdir = '/nowhere'\nfrom distlaunch.cli.option import convert\n"
    done = run_guarded(f"{code}def work():\n    return convert(None, '', '')", tmp_path)
    first, second = done.stderr.splitlines()
    assert done.returncode == 70
    assert mentions(first, "AttributeError")
    assert re.fullmatch(
        r"  .*/distlaunch/cli/option\.py:\d+ in convert; .*'/nowhere/.*",
        second,
    )


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_has_gone_away_is_no_error_to_talk_about(lines, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    source = (
        "import sys\nfrom distlaunch.cli.error_output import guarded\n"
        f"def work():\n    print('x\\n' * {lines})\n    return 0\nsys.exit(guarded(work))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", source],
            env={},
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_broken_pipe_that_is_not_stdouts_is_a_fault_of_ours(tmp_path):
    done = run_guarded("def work(): raise BrokenPipeError(32, 'Broken pipe')", tmp_path)
    assert done.returncode == 70
    assert "internal error: BrokenPipeError" in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_full_standard_output_is_reported_in_one_line_and_is_no_fault_of_ours(
    lines, unbuffered, tmp_path
):
    code = "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    code += f"def work():\n    for _ in range({lines}): print('line')\n    return 0"
    done = run_guarded(code, tmp_path, unbuffered=unbuffered)
    assert len(done.stderr.splitlines()) == 1
    assert mentions(done.stderr, "stdout", "No space left on device")
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_standard_error_cannot_take_keeps_its_exit_code():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "distlaunch", "train", "--bogus"],
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_disk_that_is_full_elsewhere_is_not_blamed_on_standard_output(tmp_path):
    done = run_guarded("def work(): raise OSError(28, 'No space left on device')", tmp_path)
    assert done.returncode == 70
    assert "internal error: OSError" in done.stderr


def test_warnings_are_one_line_each(capsys):
    print_warnings(["one", "two\x1b"])
    print_warnings([])
    assert capsys.readouterr().err == "distlaunch: warning: one\ndistlaunch: warning: two\\x1b\n"


def test_missing_standard_streams_are_replaced_before_anything_is_opened(tmp_path):
    report = tmp_path / "report"
    source = (
        "import os, sys\nfrom distlaunch.cli.error_output import repair_standard_streams\nrepair_standard_streams()\n"
        "print('nobody reads this')\nprint('nor this', file=sys.stderr)\nsys.stdin.read()\n"
        "names = [os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)]\n"
        "kept = all(map(os.get_inheritable, (0, 1, 2)))\n"
        f"open({str(report)!r}, 'w').write(f'{{names}} {{kept}}')\n"
    )
    shell = 'exec "$0" -c "$1" <&- >&- 2>&-'
    subprocess.run(["/bin/sh", "-c", shell, sys.executable, source], env={}, timeout=60, check=True)
    assert report.read_text() == "['/dev/null', '/dev/null', '/dev/null'] True"


@pytest.mark.parametrize(
    "words", [["train", "--bogus"], ["train"], ["nothing"], ["--help"], ["train", "--help"]]
)
def test_the_command_works_without_any_standard_stream(words):
    shell = 'exec "$@" <&- >&- 2>&-'
    done = subprocess.run(
        ["/bin/sh", "-c", shell, "sh", sys.executable, "-m", "distlaunch", *words],
        env={"PATH": os.defpath},
        timeout=60,
        check=False,
    )
    assert done.returncode == (0 if words[-1] == "--help" else 2)


def unread(words: list[str], tmp_path: Path) -> tuple[int, bytes]:
    """Run this with a stdout that nobody reads. Return the exit code and stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    env = {"PATH": os.defpath, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    try:
        done = subprocess.run(
            [sys.executable, *words],
            env=env,
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--num-procs", "64", "--no-python", "/bin/true"],
        ["plan", "--num-procs", "2", "--format", "json", "--no-python", "/bin/true"],
        ["train", "--num-procs", "2", "--dry-run", "--no-python", "/bin/true"],
        ["train", "--help"],
        ["--version"],
        ["backends"],
        ["torchrun", "--help"],
        ["render", "slurm", "--procs-per-node", "2", "x.py"],
    ],
    ids=" ".join,
)
def test_output_that_is_not_read_to_its_end_is_no_failure(words, tmp_path):
    assert unread(["-m", "distlaunch", *words], tmp_path) == (0, b"")


def test_a_job_whose_own_channel_breaks_has_failed_though_nobody_reads_stdout(tmp_path):
    source = """
import distlaunch.launch.run
from distlaunch.planning.train_options import TrainOptions
from distlaunch.cli.error_output import guarded
from distlaunch.cli.commands.train import train
def broken(*given, **named):
    raise BrokenPipeError(32, "Broken pipe")
distlaunch.launch.run.run_job = broken
raise SystemExit(guarded(lambda: train(TrainOptions(script="x.py"))))
"""
    code, message = unread(["-c", source], tmp_path)
    assert code == 70
    assert b"a channel of the job broke" in message


def test_the_command_prints_an_error_and_exits_with_its_code():
    done = subprocess.run(
        [sys.executable, "-m", "distlaunch", "train", "--num-gpus", "four", "x.py"],
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert mentions(done.stderr, "--num-gpus", ">=", "1", "'auto'", "'four'")
