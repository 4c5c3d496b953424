"""Where the bytes of workers go: files, pipes, formats, and readers that are slow, gone, or never there."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"
BYTES, LINES = PROGRAMS / "output_bytes.py", PROGRAMS / "output_lines.py"
LONG_LINE, FLOOD, DISK = (PROGRAMS / f"output_{name}.py" for name in ("long_line", "flood", "disk"))
PEAK_KB = 32 << 10


@pytest.fixture
def pipe():
    """Give a pipe's ends; what the test has not closed is closed after it."""
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def script(distlaunch, source: str) -> Path:
    path = distlaunch.work / "worker.py"
    path.write_text(f"import os, sys, time\nRANK = int(os.environ['RANK'])\n{source}")
    return path


def log_of(result, rank: int, attempt: int = 0) -> bytes:
    return (result.run_dir / f"attempt-{attempt}" / f"rank-{rank}.log").read_bytes()


def unfolded(output: bytes) -> dict[int, list[bytes]]:
    """Split console lines by the ranks of their prefixes."""
    found: dict[int, list[bytes]] = {}
    for line in output.splitlines():
        match = re.fullmatch(rb"\[([\d,-]+)\] (.*)", line)
        assert match, line
        for part in match[1].split(b","):
            first, _, last = part.partition(b"-")
            for rank in range(int(first), int(last or first) + 1):
                found.setdefault(rank, []).append(match[2])
    return found


def read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
    return b"".join(parts)


def numbered(rank: int, count: int, width: int) -> list[bytes]:
    return [b"%d %d " % (rank, number) + b"x" * width for number in range(count)]


# --- files and lines


def test_every_byte_of_both_streams_is_in_the_ranks_file(distlaunch):
    result = distlaunch.train("--num-procs", "2", BYTES)
    assert result.returncode == 0
    for rank in (0, 1):
        filed = log_of(result, rank)
        out = [b"<out %d.%d>" % (rank, count) + bytes(range(256)) + b"\0" * 100 for count in range(64)]
        err = [b"<err %d.%d>" % (rank, count) + bytes(reversed(range(256))) + b"\xff\xfe\n" for count in range(64)]
        end = b"the end without a newline"
        assert len(filed) == len(b"".join(out + err)) + len(end)
        for stream in (out, err):
            places = [filed.index(mark.partition(b">")[0] + b">") for mark in stream]
            assert places == sorted(places), "a stream's own order is kept"


def test_bytes_that_are_no_text_reach_a_pipe_unchanged(distlaunch):
    body = bytes(byte for byte in range(256) if byte not in b"\n\r")
    path = script(distlaunch, f"os.write(1, {body!r} + b'\\n')")
    result = distlaunch.train("--num-procs", "1", path)
    assert result.stdout_bytes == b"[0] " + body + b"\n"


def test_worker_stdout_goes_to_stdout_and_stderr_to_stderr_each_with_its_rank(distlaunch):
    path = script(distlaunch, "os.write(1, b'out %d\\n' % RANK); os.write(2, b'err %d\\n' % RANK)")
    result = distlaunch.train("--num-procs", "3", path)
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] out {rank}" for rank in range(3)]
    from_workers = [line for line in result.stderr.splitlines() if not line.startswith("distlaunch: ")]
    assert sorted(from_workers) == [f"[{rank}] err {rank}" for rank in range(3)]


def test_the_same_line_of_all_ranks_is_shown_once(distlaunch):
    path = script(
        distlaunch,
        # The ranks meet at a barrier of files, so that all print within the folding time however loaded the machine is.
        "open(f'ready-{RANK}', 'w').close()\n"
        "while not all(os.path.exists(f'ready-{rank}') for rank in range(4)): time.sleep(0.001)\n"
        "os.write(1, b'loaded 60000 samples\\n')\n",
    )
    result = distlaunch.train("--num-procs", "4", path)
    assert unfolded(result.stdout_bytes) == {rank: [b"loaded 60000 samples"] for rank in range(4)}
    assert [log_of(result, rank) for rank in range(4)] == [b"loaded 60000 samples\n"] * 4


def test_a_last_line_without_newline_is_shown_whole_and_filed_as_it_was(distlaunch):
    result = distlaunch.train("--num-procs", "2", script(distlaunch, "os.write(1, b'half of %d' % RANK)"))
    assert sorted(result.stdout.splitlines(keepends=True)) == ["[0] half of 0\n", "[1] half of 1\n"]
    assert [log_of(result, rank) for rank in (0, 1)] == [b"half of 0", b"half of 1"]


def test_a_partial_line_is_shown_before_its_worker_ends(distlaunch):
    path = script(
        distlaunch,
        "os.write(1, b'progress: 10%')\nwhile not os.path.exists('go'): time.sleep(0.01)\nos.write(1, b' done\\n')",
    )
    running = distlaunch.start(["train", "--num-procs", "1", path])
    running.wait_stdout("[0] progress: 10%")
    (distlaunch.work / "go").touch()
    assert running.wait().stdout == "[0] progress: 10% done\n"


@pytest.mark.parametrize("words", [[], ["--format", "jsonl"], ["--output", "none"]], ids=["plain", "jsonl", "none"])
def test_a_line_of_32_mib_is_filed_whole_while_memory_stays_bounded(distlaunch, words):
    result = distlaunch.train("--num-procs", "1", *words, LONG_LINE, "32", "peak")
    assert result.returncode == 0
    filed = log_of(result, 0)
    assert len(filed) == (32 << 20) + 1
    assert all(
        set(filed[start : start + (1 << 20)]) == {97 + start // (1 << 20) % 26} for start in range(0, 32 << 20, 1 << 20)
    )
    assert int((distlaunch.work / "peak").read_text()) < PEAK_KB


def test_a_worker_that_closes_its_streams_runs_on(distlaunch):
    path = script(
        distlaunch,
        "print('before', flush=True)\nos.close(1); os.close(2)\nopen(f'ran-{RANK}', 'w').close()\nos._exit(0)",
    )
    result = distlaunch.train("--num-procs", "2", path)
    assert result.returncode == 0
    assert {path.name for path in distlaunch.work.glob("ran-*")} == {"ran-0", "ran-1"}
    assert unfolded(result.stdout_bytes) == {0: [b"before"], 1: [b"before"]}


@pytest.mark.parametrize(
    ("chosen", "shown"), [("none", set()), ("0,2", {0, 2}), ("1-3", {1, 2, 3}), ("all", {0, 1, 2, 3})]
)
def test_output_chooses_the_ranks_shown_and_files_have_all(distlaunch, chosen, shown):
    path = script(distlaunch, "print('line of', RANK)")
    result = distlaunch.train("--num-procs", "4", "--output", chosen, path)
    assert result.returncode == 0
    assert set(unfolded(result.stdout_bytes)) == shown
    assert [log_of(result, rank) for rank in range(4)] == [b"line of %d\n" % rank for rank in range(4)]


def test_escape_sequences_stay_as_they_are_in_files_and_pipes(distlaunch):
    hostile = b"\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\x9b\n"
    result = distlaunch.train("--num-procs", "1", script(distlaunch, f"os.write(1, {hostile!r})"))
    assert result.stdout_bytes == b"[0] " + hostile
    assert log_of(result, 0) == hostile


@pytest.mark.parametrize("words", [[], ["--format", "rich"], ["--format", "plain"]])
def test_a_pipe_gets_neither_colours_nor_a_status_line(distlaunch, words):
    path = script(distlaunch, "print('line'); sys.exit(RANK)")
    result = distlaunch.train(
        "--num-procs", "2", *words, path, env={"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    )
    assert result.returncode == 1
    assert b"\x1b" not in result.stdout_bytes + result.stderr_bytes
    assert b"workers up" not in result.stderr_bytes


# --- jsonl


def test_jsonl_is_valid_json_on_stdout_with_events_and_output_and_nothing_on_stderr(distlaunch):
    path = script(
        distlaunch,
        "os.write(1, b'text %d \\xe2\\x82\\xac\\n\\xff\\x00binary\\nno newline' % RANK)\nos.write(2, b'\"quoted\"\\\\\\n')\nsys.exit(3 if RANK else 0)",
    )
    result = distlaunch.train("--num-procs", "2", "--format", "jsonl", path)
    assert result.returncode == 3
    assert result.stderr == ""
    assert result.stdout_bytes.endswith(b"\n")
    records = [json.loads(line) for line in result.stdout_bytes.splitlines()]
    assert all(isinstance(record["time"], float) and isinstance(record["type"], str) for record in records)
    output = [record for record in records if record["type"] == "output"]
    of_1 = [(record["stream"], record["text"]) for record in output if record["rank"] == 1]
    assert [text for stream, text in of_1 if stream == "stdout"] == ["text 1 €", "\ufffd\0binary", "no newline"]
    assert [text for stream, text in of_1 if stream == "stderr"] == ['"quoted"\\']
    kinds = [record["type"] for record in records]
    assert {"job_started", "attempt_started", "workers_started", "worker_exited", "failure"} <= set(kinds)
    [ended] = [record for record in records if record["type"] == "job_ended"]
    assert ended["exit_code"] == 3
    events = [record for record in records if record["type"] not in ("output", "message")]
    assert events == result.events, "the same job events as in events.jsonl"


# --- slow, absent and broken readers


@pytest.mark.parametrize("stream", ["1", "2"], ids=["stdout", "stderr"])
@pytest.mark.parametrize("words", [[], ["--format", "jsonl"]], ids=["plain", "jsonl"])
def test_a_failure_ends_the_job_though_nobody_reads_the_pipe(distlaunch, pipe, stream, words):
    streams = {"stdout": pipe[1], "stderr": pipe[1]}
    args = ["--num-procs", "2", "--failure-grace", "1", *words, FLOOD, "9", stream]
    result = distlaunch.train(*args, timeout=30, **streams)
    assert result.returncode == 9
    distlaunch.assert_no_survivors()
    assert "exit code 9" in (result.run_dir / "report.txt").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_job_though_nobody_reads_the_pipe(distlaunch, pipe, number, code):
    running = distlaunch.start(
        ["train", "--num-procs", "2", "--grace", "2", "--failure-grace", "1", FLOOD, "wait"],
        stdout=pipe[1],
        stderr=pipe[1],
    )
    running.wait_for(lambda: running.run_dir and (running.run_dir / "full").exists(), "full pipe")
    running.send_signal(number)
    assert running.wait(30).returncode == code
    distlaunch.assert_no_survivors()


def test_kill_9_leaves_nothing_though_nobody_reads_the_pipe(distlaunch, pipe):
    running = distlaunch.start(
        ["train", "--num-procs", "2", "--failure-grace", "1", FLOOD, "wait"],
        stdout=pipe[1],
        stderr=pipe[1],
    )
    running.wait_for(lambda: running.run_dir and (running.run_dir / "full").exists(), "full pipe")
    running.send_signal(signal.SIGKILL)
    running.wait(10)
    distlaunch.assert_no_survivors(8)


def test_a_pipe_that_is_read_late_slows_the_workers_and_loses_nothing(distlaunch, pipe):
    count, width = 40_000, 300  # 12 MB for each of two ranks: more than all buffers together
    running = distlaunch.start(["train", "--num-procs", "2", LINES, str(count), str(width)], stdout=pipe[1])
    os.close(pipe[1])
    logs = lambda: [path.stat().st_size for path in running.run_dir.glob("attempt-0/*.log")] if running.run_dir else []  # noqa: E731
    running.wait_for(lambda: sum(logs()) > 4 << 20, "filled buffers")
    assert running.process.poll() is None
    assert sum(logs()) < count * width * 2, "the workers wait for the reader"
    lines = unfolded(read_all(pipe[0]))
    assert running.wait().returncode == 0
    for rank in (0, 1):
        assert lines[rank] == numbered(rank, count, width)
        assert len(log_of(running, rank).splitlines()) == count


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_launcher_that_waits_for_its_reader_alone_can_be_ended(distlaunch, pipe, number, code):
    running = distlaunch.start(["train", "--num-procs", "2", LINES, "9000", "100"], stdout=pipe[1])
    running.wait_event("job_ended")
    assert running.process.poll() is None, "what is not read yet keeps it"
    running.send_signal(number)
    returncode = running.wait(20).returncode
    assert (returncode if returncode >= 0 else 128 - returncode) == code, "as a shell shows it"


def test_200_000_lines_through_a_slow_reader_are_all_there_and_memory_stays_flat(distlaunch, pipe):
    count, width = 100_000, 20
    running = distlaunch.start(["train", "--num-procs", "2", LINES, str(count), str(width)], stdout=pipe[1])
    os.close(pipe[1])
    parts, peak_kb = [], 0
    while part := os.read(pipe[0], 2048):  # a reader with small bites
        parts.append(part)
        if len(parts) % 64 == 0 and running.process.poll() is None:
            status = Path(f"/proc/{running.pid}/status").read_text()
            peak_kb = max([peak_kb, *(int(kb) for kb in re.findall(r"VmHWM:\s+(\d+)", status))])
    assert running.wait().returncode == 0
    lines = unfolded(b"".join(parts))
    assert {rank: lines[rank] == numbered(rank, count, width) for rank in lines} == {0: True, 1: True}
    assert 0 < peak_kb < PEAK_KB


def test_a_reader_that_goes_away_does_not_end_the_job(distlaunch, pipe):
    running = distlaunch.start(["train", "--num-procs", "2", LINES, "50000", "100"], stdout=pipe[1])
    os.close(pipe[1])
    assert os.read(pipe[0], 64)  # | head -1
    os.close(pipe[0])
    result = running.wait()
    assert result.returncode == 0
    assert "Traceback" not in result.stderr
    for rank in (0, 1):
        assert log_of(result, rank).splitlines() == numbered(rank, 50_000, 100)


def test_a_job_runs_with_all_its_own_streams_closed(distlaunch):
    def close() -> None:
        for descriptor in range(3):
            os.close(descriptor)

    result = distlaunch.train("--num-procs", "2", LINES, "1000", "100", preexec_fn=close)
    assert result.returncode == 0
    for rank in (0, 1):
        assert log_of(result, rank).splitlines() == numbered(rank, 1000, 100)
    assert all(json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines())


def test_a_failing_job_keeps_its_exit_code_with_streams_closed(distlaunch):
    def close() -> None:
        os.close(1)
        os.close(2)

    result = distlaunch.train("--num-procs", "2", LINES, "10", "10", "6", preexec_fn=close)
    assert result.returncode == 6
    assert "exit code 6" in (result.run_dir / "report.txt").read_text()


def test_our_descriptors_are_never_made_non_blocking(distlaunch, pipe):
    watcher = script(distlaunch, "print(RANK, flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)")
    running = distlaunch.start(["train", "--num-procs", "2", watcher], stdout=pipe[1], stderr=pipe[1], stdin=pipe[0])
    running.wait_workers(2)
    select.select([pipe[0]], [], [], 20)
    assert [os.get_blocking(end) for end in pipe] == [True, True]
    (distlaunch.work / "go").touch()
    assert running.wait().returncode == 0


# --- disks


IN_A_SMALL_DISK = """
mkdir -p "$1" && mount -t tmpfs -o size=512k tmpfs "$1" || exit 99
head -c 65536 /dev/zero > "$1/filler"
shift
exec "$@"
"""


def in_a_small_disk(distlaunch, disk: Path, *words: str):
    """Run ``train`` in a mount namespace of its own, with ``disk`` a file system of 512 kB, gone with its last process."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    command = [
        *unshare,
        "sh",
        "-c",
        IN_A_SMALL_DISK,
        "sh",
        str(disk),
        sys.executable,
        "-m",
        "distlaunch",
        "train",
        *words,
    ]
    return subprocess.run(
        command, env=distlaunch.env, cwd=distlaunch.work, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_full_disk_stops_the_files_once_said_and_not_the_workers(distlaunch, tmp_path):
    disk = tmp_path / "disk"
    words = ["--num-procs", "2", "--log-dir", str(disk), str(DISK), str(disk / "filler"), "stay"]
    result = in_a_small_disk(distlaunch, disk, *words)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("log files have stopped") == 1
    assert "the disk is full" in result.stderr
    shown = unfolded(result.stdout.encode())
    assert all(shown[rank][-1] == b"the last line of %d" % rank and len(shown[rank]) == 3001 for rank in (0, 1))
    assert not list(disk.iterdir()), "nothing is left of the file system"


def test_files_go_on_behind_a_gap_marker_when_the_disk_has_room_again(distlaunch, tmp_path):
    disk = tmp_path / "disk"
    keep = script(distlaunch, f"import runpy\nsys.path.insert(0, {str(PROGRAMS)!r})\nsys.argv = ['x', {str(disk / 'filler')!r}, 'free']\nrunpy.run_path({str(DISK)!r}, run_name='__main__')")  # fmt: skip
    keeper = distlaunch.work / "keep.py"
    keeper.write_text(
        "import os, shutil, subprocess, sys\n"
        "code = subprocess.run(sys.argv[3:]).returncode\n"
        "shutil.copytree(sys.argv[1], sys.argv[2], symlinks=True)\n"
        "sys.exit(code)\n"
    )
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    job = [
        sys.executable,
        "-m",
        "distlaunch",
        "train",
        "--num-procs",
        "2",
        "--job-id",
        "j",
        "--log-dir",
        str(disk),
        str(keep),
    ]
    kept = tmp_path / "kept"
    command = [
        *unshare,
        "sh",
        "-c",
        IN_A_SMALL_DISK,
        "sh",
        str(disk),
        sys.executable,
        str(keeper),
        str(disk),
        str(kept),
        *job,
    ]
    result = subprocess.run(
        command, env=distlaunch.env, cwd=distlaunch.work, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("log files have stopped") == 1
    filed = (kept / "j" / "attempt-0" / "rank-0.log").read_bytes()
    before, marker, after = filed.partition(b"\n[distlaunch: ")
    assert marker, "the gap is marked"
    missing, _, rest = after.partition(b" bytes are missing here]\n")
    shown = b"".join(line + b"\n" for line in unfolded(result.stdout.encode())[0])
    assert before == shown[: len(before)]
    assert rest == shown[len(before) + int(missing) :]
    assert rest.endswith(b"the last line of 0\n")


@pytest.mark.parametrize("below_a_file", ["file", "file/below"])
def test_a_log_directory_that_cannot_be_made_is_refused_before_anything_starts(distlaunch, below_a_file):
    (distlaunch.work / "file").touch()
    result = distlaunch.train("--log-dir", below_a_file, "--num-procs", "1", script(distlaunch, "open('ran', 'w')"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"distlaunch: error: --log-dir {below_a_file}: ")
    assert len(result.stderr.splitlines()) <= 2
    assert not (distlaunch.work / "ran").exists()


def test_a_read_only_log_directory_is_refused_before_anything_starts(distlaunch, tmp_path):
    disk = tmp_path / "disk"
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mount = 'mkdir "$1" && mount -t tmpfs -o ro tmpfs "$1" || exit 99; shift; exec "$@"'
    job = [sys.executable, "-m", "distlaunch", "train", "--num-procs", "1", "--log-dir", str(disk)]
    path = script(distlaunch, "open('ran', 'w')")
    command = [*unshare, "sh", "-c", mount, "sh", str(disk), *job, str(path)]
    result = subprocess.run(
        command, env=distlaunch.env, cwd=distlaunch.work, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"distlaunch: error: --log-dir {disk}: Read-only file system\n")
    assert not (distlaunch.work / "ran").exists()


def test_where_the_default_directory_cannot_be_written_a_temporary_one_is_used_and_said_once(distlaunch, tmp_path):
    blocked, temporary = tmp_path / "blocked", tmp_path / "tmp"
    blocked.touch()
    temporary.mkdir()
    env = {"XDG_STATE_HOME": str(blocked), "TMPDIR": str(temporary)}
    result = distlaunch.train("--num-procs", "2", LINES, "10", "10", env=env)
    assert result.returncode == 0
    [line] = [line for line in result.stderr.splitlines() if "cannot be written" in line]
    [log] = [path for path in temporary.glob("*/*/attempt-0/rank-1.log") if not path.parents[1].is_symlink()]
    assert str(log.parents[1]) in line
    assert log.parents[1].stat().st_mode & 0o777 == 0o700
    assert log.read_bytes().splitlines() == numbered(1, 10, 10)
