"""A SCRIPT from a pipe, a FIFO or stdin: all ranks run it, or it is refused."""

from __future__ import annotations

import os
import pty
import subprocess
import threading

import pytest

from tests.facts import mentions

SOURCE = "import os, sys\nprint(os.path.basename(__file__), os.environ['RANK'], sys.argv[1:], repr(sys.stdin.read()))\n"


def assert_notice(result, name: str, *words: str) -> None:
    """Check that both ranks ran the whole script, which the job keeps beside its logs."""
    assert result.returncode == 0, result.stderr
    assert [result.lines_of(rank) for rank in (0, 1)] == [
        [f"{name} {rank} {list(words)} ''"] for rank in (0, 1)
    ]
    assert (result.run_dir / name).read_text() == SOURCE
    assert (result.run_dir / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("word", ["/dev/stdin", "-", "/proc/self/fd/0", "/dev/fd/0"])
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_a_script_on_stdin_runs_on_all_ranks(distlaunch, word, kind):
    command = ["train", "--num-procs", "2", word, "--lr", "1"]
    file = distlaunch.work / "given.py"
    file.write_text(SOURCE)
    if kind == "file":
        with file.open() as stdin:
            assert_notice(distlaunch.run(command, stdin=stdin), "stdin.py", "--lr", "1")
        return
    running = distlaunch.start(command, stdin=subprocess.PIPE)
    running.stdin.write(SOURCE[:20].encode())
    running.stdin.flush()
    running.stdin.write(SOURCE[20:].encode())
    running.stdin.close()
    assert_notice(running.wait(), "stdin.py", "--lr", "1")


def test_a_script_of_a_process_substitution_runs_on_all_ranks(distlaunch):
    reader, writer = os.pipe()
    os.write(writer, SOURCE.encode())
    os.close(writer)
    result = distlaunch.train("--num-procs", "2", f"/dev/fd/{reader}", pass_fds=(reader,))
    os.close(reader)
    assert_notice(result, f"fd-{reader}.py")


@pytest.mark.parametrize(
    "words",
    [("train", "--num-procs", "2"), ("accelerate", "launch", "--num_processes", "2", "--cpu")],
)
def test_a_script_that_is_a_fifo_runs_on_all_ranks(distlaunch, words):
    fifo = distlaunch.work / "lines"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_text, args=(SOURCE,))
    writer.start()
    result = distlaunch.run([*words, "lines", "x"])
    writer.join(20)
    assert_notice(result, "lines.py", "x")


def test_a_fifo_that_no_program_writes_to_is_refused(distlaunch):
    os.mkfifo(distlaunch.work / "lines")
    result = distlaunch.train("--num-procs", "2", "lines")
    assert result.returncode == 2
    assert mentions(result.stderr, "lines", "no program", "5 s")
    assert mentions(result.stderr, "hint", "the program")


def test_torchrun_takes_a_script_from_stdin(distlaunch):
    (distlaunch.work / "given.py").write_text(
        "import os\nprint('rank', os.environ['RANK'], __file__)\n"
    )
    with (distlaunch.work / "given.py").open() as stdin:
        result = distlaunch.run(["torchrun", "--nproc-per-node", "2", "/dev/stdin"], stdin=stdin)
    assert result.returncode == 0, result.stderr
    assert sorted(line.split()[1] for line in result.stdout.splitlines()) == ["0", "1"]
    assert all(line.endswith("/stdin.py") for line in result.stdout.splitlines())


def test_a_script_that_is_typed_runs_when_it_ends(distlaunch):
    ours, theirs = pty.openpty()
    running = distlaunch.start(["train", "--num-procs", "2", "-"], stdin=theirs)
    os.write(ours, b"import os\nprint('typed', os.environ['RANK'])\n\x04")
    result = running.wait()
    assert [result.lines_of(rank) for rank in (0, 1)] == [["typed 0"], ["typed 1"]]
    os.close(ours)
    os.close(theirs)


def test_a_traceback_names_the_file_in_the_run_directory_and_shows_its_lines(distlaunch):
    with (distlaunch.work / "given.py").open("w+") as stdin:
        stdin.write("def f():\n    raise KeyError('lost')\n\nf()\n")
        stdin.seek(0)
        result = distlaunch.run(["train", "--num-procs", "2", "/dev/stdin"], stdin=stdin)
    assert result.returncode == 1
    assert "at stdin.py:2 in f" in result.stderr
    assert "raise KeyError('lost')" in result.stderr


def test_a_second_job_of_the_same_id_runs_its_own_script(distlaunch):
    for text in ("one", "two"):
        (distlaunch.work / "given.py").write_text(f"print({text!r})\n")
        with (distlaunch.work / "given.py").open() as stdin:
            result = distlaunch.run(
                ["train", "--num-procs", "2", "--job-id", "same", "-"], stdin=stdin
            )
        assert result.returncode == 0, result.stderr
        assert text in result.stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("train", "--num-procs", "2", "/dev/zero"),
            "/dev/zero: the script is longer than 16 MiB",
        ),
        (
            ("train", "--num-procs", "2", "--no-python", "/dev/stdin"),
            "/dev/stdin: a program that is to be executed must be a file",
        ),
        (
            ("train", "--hosts", "a:1,b:1", "--device", "cpu", "-"),
            "-: only this launcher can read it, and the job has other nodes",
        ),
        (
            (
                "torchrun",
                "--nnodes",
                "2",
                "--node-rank",
                "0",
                "--rdzv-endpoint",
                "127.0.0.1:29871",
                "/dev/stdin",
            ),
            "/dev/stdin: only this launcher can read it",
        ),
        (
            ("horovodrun", "-np", "2", "python", "-u", "-"),
            "python -: only one of the workers could read the script",
        ),
        (
            ("train", "--num-procs", "2", "--no-python", "python3", "/dev/stdin"),
            "python3 /dev/stdin: only one of the workers could read",
        ),
    ],
)
def test_a_script_that_not_all_workers_could_run_is_refused_before_anything_is_made(
    distlaunch, words, why
):
    with (distlaunch.work / "given.py").open("w+") as stdin:
        stdin.write("print('ran')\n")
        stdin.seek(0)
        result = distlaunch.run(words, stdin=stdin)
    assert result.returncode == 2
    assert why in result.stderr
    assert "ran" not in result.stdout
    assert not distlaunch.jobs.exists() or not any(distlaunch.jobs.iterdir())


def test_plan_reads_nothing_of_the_script(distlaunch):
    reader, writer = os.pipe()
    result = distlaunch.run(["plan", "--num-procs", "2", "-"], stdin=reader)
    assert result.returncode == 0, result.stderr
    assert "stdin.py" in result.stdout
    os.close(reader)
    os.close(writer)
