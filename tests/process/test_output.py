from __future__ import annotations

import json

import pytest

from tests.process.outputs import BYTES, LONG_LINE, PEAK_KB, log_of, script, unfolded

# --- files and lines


def test_every_byte_of_both_streams_is_in_the_ranks_file(distlaunch):
    result = distlaunch.train("--num-procs", "2", BYTES)
    assert result.returncode == 0
    for rank in (0, 1):
        filed = log_of(result, rank)
        out = [
            b"<out %d.%d>" % (rank, count) + bytes(range(256)) + b"\0" * 100 for count in range(64)
        ]
        err = [
            b"<err %d.%d>" % (rank, count) + bytes(reversed(range(256))) + b"\xff\xfe\n"
            for count in range(64)
        ]
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
    from_workers = [
        line for line in result.stderr.splitlines() if not line.startswith("distlaunch: ")
    ]
    assert sorted(from_workers) == [f"[{rank}] err {rank}" for rank in range(3)]


def test_the_same_line_of_all_ranks_is_shown_once(distlaunch):
    path = script(
        distlaunch,
        # The ranks meet at a barrier of files, so that all print within the folding time however
        # loaded the machine is.
        "open(f'ready-{RANK}', 'w').close()\n"
        "while not all(os.path.exists(f'ready-{rank}') for rank in range(4)): time.sleep(0.001)\n"
        "os.write(1, b'loaded 60000 samples\\n')\n",
    )
    result = distlaunch.train("--num-procs", "4", path)
    assert unfolded(result.stdout_bytes) == {rank: [b"loaded 60000 samples"] for rank in range(4)}
    assert [log_of(result, rank) for rank in range(4)] == [b"loaded 60000 samples\n"] * 4


def test_a_last_line_without_newline_is_shown_whole_and_filed_as_it_was(distlaunch):
    result = distlaunch.train(
        "--num-procs", "2", script(distlaunch, "os.write(1, b'half of %d' % RANK)")
    )
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


@pytest.mark.parametrize(
    "words", [[], ["--format", "jsonl"], ["--output", "none"]], ids=["plain", "jsonl", "none"]
)
def test_a_line_of_32_mib_is_filed_whole_while_memory_stays_bounded(distlaunch, words):
    result = distlaunch.train("--num-procs", "1", *words, LONG_LINE, "32", "peak")
    assert result.returncode == 0
    filed = log_of(result, 0)
    assert len(filed) == (32 << 20) + 1
    assert all(
        set(filed[start : start + (1 << 20)]) == {97 + start // (1 << 20) % 26}
        for start in range(0, 32 << 20, 1 << 20)
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
    ("chosen", "shown"),
    [("none", set()), ("0,2", {0, 2}), ("1-3", {1, 2, 3}), ("all", {0, 1, 2, 3})],
)
def test_output_chooses_the_ranks_shown_and_files_have_all(distlaunch, chosen, shown):
    path = script(distlaunch, "print('line of', RANK)")
    result = distlaunch.train("--num-procs", "4", "--output", chosen, path)
    assert result.returncode == 0
    assert set(unfolded(result.stdout_bytes)) == shown
    assert [log_of(result, rank) for rank in range(4)] == [
        b"line of %d\n" % rank for rank in range(4)
    ]


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
    assert all(
        isinstance(record["time"], float) and isinstance(record["type"], str) for record in records
    )
    output = [record for record in records if record["type"] == "output"]
    of_1 = [(record["stream"], record["text"]) for record in output if record["rank"] == 1]
    assert [text for stream, text in of_1 if stream == "stdout"] == [
        "text 1 €",
        "\ufffd\0binary",
        "no newline",
    ]
    assert [text for stream, text in of_1 if stream == "stderr"] == ['"quoted"\\']
    kinds = [record["type"] for record in records]
    assert {"job_started", "attempt_started", "workers_started", "worker_exited", "failure"} <= set(
        kinds
    )
    [ended] = [record for record in records if record["type"] == "job_ended"]
    assert ended["exit_code"] == 3
    events = [record for record in records if record["type"] not in ("output", "message")]
    assert events == result.events, "the same job events as in events.jsonl"
