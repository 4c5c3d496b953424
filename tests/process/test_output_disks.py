"""Log files on disks that are full, read-only, or not writable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facts import mentions
from tests.launcher import PROGRAMS
from tests.process.outputs import DISK, LINES, numbered, script, unfolded

TRAIN = [sys.executable, "-m", "distlaunch", "train"]
IN_A_SMALL_DISK = """
mkdir -p "$1" && mount -t tmpfs -o size=512k tmpfs "$1" || exit 99
head -c 65536 /dev/zero > "$1/filler"
shift
exec "$@"
"""


def in_a_small_disk(distlaunch, disk: Path, *command: str | Path):
    """Run a command in a mount namespace with ``disk``, a file system of 512 kB that goes with its
    last process."""
    unshare = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    )
    return subprocess.run(
        [*unshare, "sh", "-c", IN_A_SMALL_DISK, "sh", disk, *command],
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_full_disk_stops_the_files_with_one_notice_and_not_the_workers(distlaunch, tmp_path):
    disk = tmp_path / "disk"
    words = ["--num-procs", "2", "--log-dir", disk, DISK, disk / "filler", "stay"]
    result = in_a_small_disk(distlaunch, disk, *TRAIN, *words)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("log files") == 1
    assert mentions(result.stderr, "log files", "full")
    shown = unfolded(result.stdout.encode())
    assert all(
        shown[rank][-1] == b"the last line of %d" % rank and len(shown[rank]) == 3001
        for rank in (0, 1)
    )
    assert not list(disk.iterdir()), "nothing is left of the file system"


def test_the_commands_for_jobs_and_on_event_work_on_a_full_disk(distlaunch, tmp_path):
    disk = tmp_path / "disk"
    ask = distlaunch.work / "ask.sh"
    ask.write_text(
        f"""
        run="{sys.executable} -m distlaunch"
        $run train --num-procs 2 --job-id j --log-dir {disk} --on-event 'sh -c "tee -a events"' \
            {DISK} {disk / "filler"} stay > train.out 2>&1
        echo $?
        $run ps --all --log-dir {disk} | tail -n 1
        $run logs j --log-dir {disk} | wc -l
        $run events j --log-dir {disk} | wc -l
        $run status j --log-dir {disk} --format json > status.json
        $run rm j --log-dir {disk} && ls {disk}
        """
    )
    result = in_a_small_disk(distlaunch, disk, "sh", ask)
    code, row, lines, count, *left = result.stdout.splitlines()
    assert (code, result.stderr) == ("0", "")
    assert mentions(row, "j")
    assert int(lines) >= 0
    assert int(count) >= 1
    assert json.loads((distlaunch.work / "status.json").read_text())["job_id"] == "j"
    assert left == ["filler"]
    types = [
        json.loads(line)["type"] for line in (distlaunch.work / "events").read_text().splitlines()
    ]
    assert types == ["job_started", "job_ended"]


def test_files_go_on_behind_a_gap_marker_when_the_disk_has_room_again(distlaunch, tmp_path):
    disk = tmp_path / "disk"
    keep = script(
        distlaunch,
        f"import runpy\nsys.path.insert(0, {str(PROGRAMS)!r})\nsys.argv = ['x', {str(disk / 'filler')!r}, 'free']\nrunpy.run_path({str(DISK)!r}, run_name='__main__')",
    )
    keeper = distlaunch.work / "keep.py"
    keeper.write_text(
        "import os, shutil, subprocess, sys\n"
        "code = subprocess.run(sys.argv[3:]).returncode\n"
        "shutil.copytree(sys.argv[1], sys.argv[2], symlinks=True)\n"
        "sys.exit(code)\n"
    )
    kept = tmp_path / "kept"
    words = ["--num-procs", "2", "--job-id", "j", "--log-dir", disk, keep]
    result = in_a_small_disk(distlaunch, disk, sys.executable, keeper, disk, kept, *TRAIN, *words)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("log files") == 1
    filed = (kept / "j" / "attempt-0" / "rank-0.log").read_bytes()
    before, marker, after = filed.partition(b"\n[distlaunch: ")
    assert marker, "the gap is marked"
    missing, _, rest = after.partition(b" bytes are missing here]\n")
    shown = b"".join(line + b"\n" for line in unfolded(result.stdout.encode())[0])
    assert before == shown[: len(before)]
    assert rest == shown[len(before) + int(missing) :]
    assert rest.endswith(b"the last line of 0\n")


@pytest.mark.parametrize("below_a_file", ["file", "file/below"])
def test_a_log_directory_that_cannot_be_made_is_refused_before_anything_starts(
    distlaunch, below_a_file
):
    (distlaunch.work / "file").touch()
    result = distlaunch.train(
        "--log-dir", below_a_file, "--num-procs", "1", script(distlaunch, "open('ran', 'w')")
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"distlaunch: error: --log-dir {below_a_file}: ")
    assert len(result.stderr.splitlines()) <= 2
    assert not (distlaunch.work / "ran").exists()


def test_a_read_only_log_directory_is_refused_before_anything_starts(distlaunch, tmp_path):
    disk = tmp_path / "disk"
    unshare = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    )
    mount = 'mkdir "$1" && mount -t tmpfs -o ro tmpfs "$1" || exit 99; shift; exec "$@"'
    job = [sys.executable, "-m", "distlaunch", "train", "--num-procs", "1", "--log-dir", str(disk)]
    path = script(distlaunch, "open('ran', 'w')")
    command = [*unshare, "sh", "-c", mount, "sh", str(disk), *job, str(path)]
    result = subprocess.run(
        command,
        env=distlaunch.env,
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"distlaunch: error: --log-dir {disk}: Read-only file system\n")
    assert not (distlaunch.work / "ran").exists()


def apart(distlaunch, setup: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a job in a mount namespace of its own, after the shell script ``setup``."""
    unshare = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    )
    command = [
        *unshare,
        "sh",
        "-c",
        f'{setup}; exec "$@"',
        "sh",
        *TRAIN,
        "--num-procs",
        "1",
        *words,
    ]
    return subprocess.run(
        command,
        env={**distlaunch.env, **environ},
        cwd=distlaunch.work,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ("ulimit -f 0", "File too large"),
        (
            'for each in state tmp /tmp /var/tmp .; do mount --bind -o ro "$each" "$each"; done; cd "$PWD"',
            "Read-only file system",
        ),
    ],
)
def test_where_no_log_file_can_be_made_each_place_is_named_with_the_reason(distlaunch, setup, why):
    path = script(distlaunch, "open('ran', 'w')")
    for name in ("state", "tmp"):
        (distlaunch.work / name).mkdir()
    state, temporary = distlaunch.work / "state", distlaunch.work / "tmp"
    result = apart(distlaunch, setup, str(path), XDG_STATE_HOME=str(state), TMPDIR=str(temporary))
    assert result.returncode == 2, result.stderr
    first, hint = result.stderr.splitlines()
    assert mentions(first, "error", "log files", f"{state}/distlaunch/jobs: {why}; ")
    for place in (temporary, "/tmp", "/var/tmp", distlaunch.work):
        assert f"; {place}: {why}" in first
    assert mentions(hint, "--log-dir")
    assert not (distlaunch.work / "ran").exists()


def test_a_machine_without_dev_null_gets_an_error(distlaunch):
    path = script(distlaunch, "open('ran', 'w')")
    result = apart(distlaunch, "mount -t tmpfs tmpfs /dev", str(path))
    assert result.returncode == 2, result.stderr
    error, hint = result.stderr.splitlines()
    assert mentions(error, "error", "/dev/null", "No such file or directory")
    assert mentions(hint, "hint", "mknod -m 666 /dev/null c 1 3")
    assert not (distlaunch.work / "ran").exists()


def test_where_the_default_directory_cannot_be_written_a_temporary_one_is_used_and_reported_once(
    distlaunch, tmp_path
):
    blocked, temporary = tmp_path / "blocked", tmp_path / "tmp"
    blocked.touch()
    temporary.mkdir()
    env = {"XDG_STATE_HOME": str(blocked), "TMPDIR": str(temporary)}
    result = distlaunch.train("--num-procs", "2", LINES, "10", "10", env=env)
    assert result.returncode == 0
    [line] = [line for line in result.stderr.splitlines() if "cannot be used" in line]
    assert mentions(line, f"{blocked}/distlaunch/jobs", "Not a directory")
    [log] = [
        path
        for path in temporary.glob("*/*/attempt-0/rank-1.log")
        if not path.parents[1].is_symlink()
    ]
    assert str(log.parents[1]) in line
    assert log.parents[1].stat().st_mode & 0o777 == 0o700
    assert log.read_bytes().splitlines() == numbered(1, 10, 10)


def test_a_start_on_a_full_disk_leaves_no_run_directory(distlaunch, tmp_path):
    disk = tmp_path / "disk"
    fill = 'cat /dev/zero > "$0/rest" 2>/dev/null; "$@"; code=$?; ls "$0"; exit $code'
    words = ["--num-procs", "1", "--log-dir", disk, "--no-python", "/bin/true"]
    result = in_a_small_disk(distlaunch, disk, "sh", "-c", fill, disk, *TRAIN, *words)
    assert result.returncode == 2, result.stderr
    assert "No space left on device" in result.stderr
    assert result.stdout.split() == ["filler", "rest"]


def test_the_log_of_a_rank_has_a_limit_that_is_said_once(distlaunch):
    path = distlaunch.work / "train.py"
    path.write_text(
        "import os\nfor number in range(20000):\n    print(os.environ['RANK'], number, 'x' * 50)\n"
    )
    result = distlaunch.train("--num-procs", "2", "--log-max-size", "256K", path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("--log-max-size") == 1
    for rank in (0, 1):
        data = (result.run_dir / "attempt-0" / f"rank-{rank}.log").read_bytes()
        assert 128 << 10 < len(data) < 512 << 10
        assert data.startswith(b"%d 0 x" % rank)
        assert data.splitlines()[-1].startswith(b"%d 19999 x" % rank)
        assert data.count(b"left out here") == 1
    shown = distlaunch.run(["logs", "latest", "--rank", "1", "--tail", "1"]).stdout
    assert shown.startswith("1 19999 x")
    whole = distlaunch.train("--num-procs", "2", path)
    assert len((whole.run_dir / "attempt-0" / "rank-0.log").read_bytes().splitlines()) == 20000


@pytest.mark.parametrize("size", ["", "64", "10", "-5M", "1.5G", "64X", "9" * 30, "2000T"])
def test_other_sizes_are_refused(distlaunch, size):
    result = distlaunch.run(["train", "--log-max-size", size, "train.py"])
    assert result.returncode == 2
    assert "--log-max-size" in result.stderr
