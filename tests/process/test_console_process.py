"""The console in a process of its own, on the descriptors 0-2 that a shell would give it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest


@pytest.fixture
def start():
    """Start a small program that has ``console``, opened for two ranks, on descriptors of the
    test's choice."""
    started: list[subprocess.Popen[bytes]] = []

    def run(body: str, **streams) -> subprocess.Popen[bytes]:
        code = (
            "import os, sys\n"
            "from distlaunch.console.console import open_console\n"
            "console = open_console(world_size=2, environ=dict(os.environ))\n"
        )
        env = {"PATH": os.environ.get("PATH", os.defpath)}
        process = subprocess.Popen(
            [sys.executable, "-c", code + textwrap.dedent(body)],
            env=env,
            **{"stdin": subprocess.DEVNULL, **streams},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


FLOOD = """
    while console.has_room():
        console.output(0, 1, b"z" * 9999 + b"\\n", 0.0)
        console.tick(1e9)
"""


def test_streams_of_the_process_are_used(start):
    process = start(
        """
        for rank in (0, 1):
            console.output(rank, 1, b"out\\n", 0.0)
        console.output(1, 2, b"err\\n", 0.0)
        console.say("ours")
        console.close(timeout_s=None)
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.communicate(timeout=20) == (b"[0-1] out\n", b"[1] err\ndistlaunch: ours\n")


def test_one_pipe_for_both_streams_keeps_their_order(start):
    process = start(
        """
        for number in range(2000):
            console.output(0, 1 + number % 2, b"%d\\n" % number, 0.0)
        console.close(timeout_s=None)
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    out, _ = process.communicate(timeout=20)
    assert out == b"".join(b"[0] %d\n" % number for number in range(2000))


def test_a_stuck_pipe_does_not_keep_the_process_from_ending(start):
    process = start(
        FLOOD
        + """
    lost = console.close(timeout_s=0.05)
    print(lost, file=sys.stderr)
    """,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.wait(20) == 0
    assert int(process.stderr.read()) > 1 << 20


def test_a_process_that_never_closes_the_console_ends_all_the_same(start):
    process = start(FLOOD + "\n    sys.exit(7)\n", stdout=subprocess.PIPE)
    assert process.wait(20) == 7


def test_a_reader_that_goes_away_does_not_end_the_process(start):
    process = start(
        """
        for _ in range(2_000):
            console.output(0, 1, b"z" * 9999 + b"\\n", 0.0)
        lost = console.close(timeout_s=None)
        print("lost" if lost else "kept", file=sys.stderr)
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr.read() == b"lost\n"


def test_closed_descriptors_are_left_alone_even_when_their_numbers_are_used_again(start, tmp_path):
    target = tmp_path / "other"
    process = start(
        f"""
        os.close(1)
        os.close(2)
        console = open_console(world_size=2, environ={{}})
        assert os.open({str(target)!r}, os.O_WRONLY | os.O_CREAT) == 1
        console.output(0, 1, b"x\\n", 0.0)
        console.say("y")
        console.close(timeout_s=None)
        """
    )
    assert process.wait(20) == 0
    assert target.read_bytes() == b""


def test_signals_are_never_delivered_to_a_writer_thread(start):
    process = start(
        """
        console.say("x")
        console._err.writer.wait_idle(20)
        for task in os.listdir("/proc/self/task"):
            if int(task) != os.getpid():
                status = open(f"/proc/self/task/{task}/status").read()
                blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        import signal
        assert all(blocked >> number - 1 & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)), hex(blocked)
        console.close(timeout_s=None)
        """,
        stderr=subprocess.PIPE,
    )
    _, err = process.communicate(timeout=20)
    assert err == b"distlaunch: x\n"
    assert process.returncode == 0


def test_opening_the_console_loads_nothing_heavy(start):
    process = start(
        """
        import subprocess
        code = (
            "import sys, distlaunch.coordinator.runtime.sink, threading, signal; before = set(sys.modules);"
            "from distlaunch.console.console import open_console;"
            "console = open_console(world_size=8, environ={});"
            "console.output(0, 1, b'x' * 9, 0.0); console.tick(1.0); console.close(timeout_s=None);"
            "print('', *sorted(set(sys.modules) - before), file=sys.stderr)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _, err = process.communicate(timeout=20)
    loaded = set(err.decode().split())
    assert "distlaunch.console.console" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {
        "rich",
        "re",
        "json",
        "logging",
        "pathlib",
        "subprocess",
    }


def test_jsonl_puts_everything_on_stdout(start):
    process = start(
        """
        console = open_console(world_size=2, environ={}, format="jsonl")
        console.output(1, 2, b"err\\n", 0.0)
        console.say("ours", level="error")
        console.event({"event": "ended"})
        console.close(timeout_s=None)
        """,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(timeout=20)
    assert err == b""
    kinds = [
        (record.get("type"), record.get("text")) for record in map(json.loads, out.splitlines())
    ]
    assert kinds == [("output", "err"), ("message", "ours"), (None, None)]


LOST = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in a collective of native code
rank = int(os.environ["RANK"])
def train():
    open(f"ready-{rank}", "w").close()
    if rank == 3:
        while not all(os.path.exists(f"ready-{each}") for each in range(8)):
            time.sleep(0.01)
        print("rank 3 reads bad data", flush=True)
        raise ValueError("bad sample 17")
    while not os.path.exists("failed"):
        time.sleep(0.01)
    time.sleep(rank * 0.15)  # longer than equal lines are held to be folded at once
    print(f"last step of rank {rank}", flush=True)
    raise RuntimeError(f"[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:{41000 + rank}")
try:
    train()
except ValueError:
    open("failed", "w").close()
    raise
"""


@pytest.mark.parametrize("format_", ["plain", "jsonl"])
def test_tracebacks_of_ranks_that_lost_another_rank_become_one_line_with_a_count(
    distlaunch, format_
):
    script = distlaunch.work / "lost.py"
    script.write_text(LOST)
    result = distlaunch.train(
        "--num-procs", "8", "--failure-grace", "20", "--format", format_, script
    )
    assert result.returncode == 1
    reported = r"^\[([\d,-]+)\] \.\.\. (?:(\d+) ranks )?repeated (\d+) lines of rank (\d) above \(numbers differ\)$"
    found = re.findall(reported, result.stderr, re.MULTILINE)
    shown = (result.stdout if format_ == "jsonl" else result.stderr).count(
        "Connection closed by peer [127.0.0.1]:4100"
    )
    if format_ == "jsonl":
        assert not found
        assert shown >= 7
        return
    # The report at the end names one of them once more.
    assert shown <= 3
    assert sum(int(count or 1) for _, count, _, _ in found) >= 5
    assert max(int(count or 1) for _, count, _, _ in found) >= 2
    assert result.stderr.count("ValueError: bad sample 17") >= 1
    for rank in (0, 1, 2, 4, 5, 6, 7):
        lines = result.lines_of(rank)
        assert lines[0] == f"last step of rank {rank}"
        assert lines[-1].endswith(f":{41000 + rank}")
        assert f"[{rank}] last step of rank {rank}" in result.stdout.splitlines()
