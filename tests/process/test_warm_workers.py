"""Forked workers are as executed ones, at the start and at every restart."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import termios
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"
SERVER = "dl-warm"
COLD = "workers start without preloading"
AGAIN = ("--min-uptime", "0")


def exits(result) -> list[tuple[int, int, int]]:
    return [
        (event["attempt"], event["rank"], event["returncode"])
        for event in result.of_type("worker_exited")
    ]


# --- warm workers are as cold ones


@pytest.fixture
def same(job, tmp_path):
    """Run ``same.py`` cold and warm. Return the output of each rank in both."""

    def run(kind: str, options: Sequence[str] = (), modules: str = "json") -> list[list[dict]]:
        work = tmp_path / "same"
        work.mkdir()
        words: list[str | Path] = [work / "same.py"]
        (work / "same.py").write_text((PROGRAMS / "same.py").read_text())
        if kind == "module":
            words = ["-m", "same"]
        elif kind == "folder":
            (work / "folder").mkdir()
            (work / "same.py").rename(work / "folder" / "__main__.py")
            words = ["folder"]
        elif kind == "zip":
            with zipfile.ZipFile(work / "same.zip", "w") as archive:
                archive.write(work / "same.py", "__main__.py")
            words = ["same.zip"]
        elif kind == "link":
            (work / "links").mkdir()
            (work / "links" / "linked.py").symlink_to(work / "same.py")
            words = ["links/linked.py"]
        seen = []
        for preload in ([], ["--preload", modules]):
            result = job.launcher.train(
                *("--num-procs", "2", "--format", "plain"),
                *("--job-id", "same", "--log-dir", tmp_path / f"logs{len(preload)}"),
                *(*options, *preload, *words, "a", "", "b c", "--num-procs=3", "é\n"),
                cwd=work,
            )
            assert result.returncode == 0, result.stderr
            assert COLD not in result.stderr
            seen.append(
                [
                    json.loads(plain((work / f"same-{rank}.json").read_text(), len(preload)))
                    for rank in (0, 1)
                ]
            )
        return seen

    def plain(text: str, number: int) -> str:
        return text.replace(f"/logs{number}/", "/logs/")

    return run


OWN = ("DISTLAUNCH_COOKIE", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")
"""Differ from job to job."""


def differences(cold: Any, warm: Any, at: str = "") -> list[str]:
    if isinstance(cold, dict) and isinstance(warm, dict):
        return [
            line
            for key in sorted({*cold, *warm})
            if key not in OWN
            for line in differences(
                cold.get(key, "nothing"), warm.get(key, "nothing"), f"{at}/{key}"
            )
        ]
    return [] if cold == warm else [f"{at}: cold {cold!r}, warm {warm!r}"]


def loaded_by(module: str) -> set[str]:
    code = (
        f"import sys\nbefore = set(sys.modules)\nimport {module}\nprint(*set(sys.modules) - before)"
    )
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


@pytest.mark.parametrize("kind", ["script", "link", "module", "folder", "zip"])
def test_a_warm_worker_sees_what_a_cold_one_sees(same, kind):
    cold, warm = same(kind)
    for rank in (0, 1):
        left, right = cold[rank]["same"], warm[rank]["same"]
        more = set(right.pop("modules")) - set(left.pop("modules"))
        assert "json" in more
        assert more <= loaded_by("json")
        added = set(right.pop("importer_cache")) - set(left.pop("importer_cache"))
        assert {os.path.basename(path) for path in added} <= {"json", "re", "collections"}
        assert differences(left, right) == []


@pytest.mark.parametrize(
    ("options", "env"),
    [
        (["--hang-timeout", "60"], {}),
        (["--bind", "cores"], {}),
        ([], {"PYTHONUNBUFFERED": "", "LANG": "C", "LC_ALL": ""}),
        (
            [],
            {
                "PYTHONSAFEPATH": "1",
                "PYTHONWARNINGS": "error",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONHASHSEED": "7",
            },
        ),
        (["-x", "PYTHONFAULTHANDLER=1", "-x", "MANY=" + "x" * 20000], {}),
    ],
)
def test_so_it_does_with_options_and_variables_that_change_the_start(
    same, monkeypatch, job, options, env
):
    job.launcher.env.update(env)
    cold, warm = same("script", options)
    for rank in (0, 1):
        left, right = cold[rank]["same"], warm[rank]["same"]
        for key in ("modules", "importer_cache"):
            del left[key], right[key]
        assert differences(left, right) == []
        if "PYTHONHASHSEED" in env:
            assert cold[rank]["hash"] == warm[rank]["hash"]


def test_random_numbers_differ_between_the_ranks(same):
    for seen in same("script"):
        assert all(
            seen[0]["differs"][name] != seen[1]["differs"][name] for name in seen[0]["differs"]
        )


def test_processes_threads_subprocesses_and_pickles_at_exit_work(warm):
    result = warm("uses.py", modules="json,multiprocessing.pool,threading,tempfile").wait()
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert result.lines_of(rank) == ["exit 2", "exit 1"]


ENDS = {
    "import sys; sys.exit(5)": 5,
    "import sys; sys.exit('some text')": 1,
    "raise ValueError('a value')": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import os; os._exit(9)": 9,
    "import os; os.abort()": -signal.SIGABRT,
    "import os; os.kill(os.getpid(), 15)": -signal.SIGTERM,
    "def f():\n    raise OSError('inner')\nf()": 1,
    "x = (": 1,
}


@pytest.mark.parametrize("text", ENDS)
def test_a_warm_worker_ends_as_a_cold_one_with_the_same_words(job, distlaunch, text):
    (job.work / "end.py").write_text(text + "\n")
    seen = []
    for preload in ([], ["--preload", "json"]):
        result = distlaunch.train(
            "--num-procs",
            "1",
            "-x",
            "PYTHONFAULTHANDLER=1",
            "--format",
            "plain",
            *preload,
            "end.py",
        )
        assert COLD not in result.stderr
        message = b"".join(
            path.read_bytes() for path in sorted((result.run_dir / "attempt-0").iterdir())
        )
        message = re.sub(rb"0x[0-9a-f]+", b"0x", message)  # faulthandler's id of the thread
        seen.append((exits(result)[0][2], message, result.returncode))
    assert seen[0] == seen[1]
    assert seen[0][0] == ENDS[text]


def test_the_users_own_sitecustomize_runs_in_each_worker(job, warm, module):
    module(
        "sitecustomize",
        "import os, sys\nprint('site of', os.environ['RANK'], __file__[-21:], flush=True)",
    )
    (job.work / "see.py").write_text("import sys\nprint('sitecustomize' in sys.modules)\n")
    result = warm(job.work / "see.py").wait()
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert result.lines_of(rank) == [f"site of {rank} work/sitecustomize.py", "True"]


def test_changes_by_an_imported_preload_module_are_in_the_workers(warm, module, job):
    module(
        "changes",
        """
        import os, signal, sys, logging
        os.environ["CHANGED"] = "yes"
        os.environ.setdefault("RANK", "server")
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        logging.basicConfig(stream=sys.stderr, format="%(message)s")
        """,
    )
    (job.work / "see.py").write_text(
        "import os, signal, logging\n"
        "print(os.environ['CHANGED'], signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, os.system('test $CHANGED = yes'), os.environ['RANK'])\n"
        "logging.error('logged')\n"
    )
    result = warm(job.work / "see.py", modules="changes").wait()
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert sorted(result.lines_of(rank)) == ["logged", f"yes True 0 {rank}"]


def test_workers_that_are_bound_get_their_cpus(warm, job):
    cpus = sorted(os.sched_getaffinity(0))
    result = warm("process_state.py", options=["--bind", "cores"]).wait()
    assert result.returncode == 0, result.stderr
    bound = [json.loads(job.sign(f"process-{rank}"))["affinity"] for rank in (0, 1)]
    assert sorted({*bound[0], *bound[1]}) == cpus


def test_ps_shows_the_server_by_its_name_and_workers_by_theirs(job, warm):
    running = warm("waits.py")
    workers = job.await_ready(running)
    server = job.server_of(running)
    assert server not in workers
    for pid in workers:
        assert Path(f"/proc/{pid}/comm").read_text().startswith("python")
        assert b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    job.launcher.assert_no_survivors()


# --- restarts


def test_every_restart_is_forked_from_the_one_server(job, warm):
    running = warm("ends.py", "3", "3", "raise-a", "ok", options=["--max-restarts", "3", *AGAIN])
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert [event["attempt"] for event in result.of_type("attempt_started")] == [0, 1, 2, 3]
    for attempt in range(4):
        for rank in (0, 1):
            reported = json.loads(job.sign(f"attempt-{attempt}-rank-{rank}"))
            assert (reported["env"]["DISTLAUNCH_ATTEMPT"], reported["env"]["RANK"]) == (
                str(attempt),
                str(rank),
            )
            assert reported["older"] == []
    assert COLD not in result.stderr
    job.launcher.assert_no_survivors()


REPEATS = """
import json, os, sys
sys.path.insert(0, {programs!r})
from signs import sign
def kept(pid):
    with open(f"/proc/{{pid}}/statm") as file:
        pages = int(file.read().split()[1])
    return len(os.listdir(f"/proc/{{pid}}/fd")), pages
def children(pid):
    return [int(child) for task in os.listdir(f"/proc/{{pid}}/task") for child in open(f"/proc/{{pid}}/task/{{task}}/children").read().split()]
attempt = int(os.environ["DISTLAUNCH_ATTEMPT"])
if os.environ["RANK"] == "0":
    spawner = os.getppid()
    launcher = int(open(f"/proc/{{spawner}}/stat").read().rpartition(")")[2].split()[1])
    server = [pid for pid in children(spawner) if open(f"/proc/{{pid}}/comm").read() == "dl-warm\\n"]
    others = [pid for pid in children(spawner) if pid not in server]
    sign(f"kept-{{attempt}}", json.dumps([kept(launcher), kept(spawner), kept(server[0]), len(others), len(server)]))
    sys.exit(3 if attempt < {last} else 0)
elif attempt < {last}:
    import signal
    signal.pause()
"""


def test_a_hundred_restarts_leak_nothing(job, warm):
    last = 100
    (job.work / "repeats.py").write_text(REPEATS.format(programs=str(PROGRAMS), last=last))
    result = warm(job.work / "repeats.py", options=["--max-restarts", str(last), *AGAIN]).wait(110)
    assert result.returncode == 0, result.stderr
    early, late = (json.loads(job.sign(f"kept-{attempt}")) for attempt in (10, last))
    for (descriptors, pages), (descriptors_late, pages_late) in zip(
        early[:3], late[:3], strict=True
    ):
        assert (
            descriptors_late <= descriptors + 20
        )  # streams of the moment; one kept by each attempt would make 90
        assert pages_late <= pages + 512  # 2 MiB
    assert late[3] <= 2
    assert late[4] == 1


# --- many, limits, streams


def own_the_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("preload", [[], ["--preload", "json"]], ids=["cold", "warm"])
def test_one_worker_has_the_terminal_with_a_debugger(job, distlaunch, preload):
    (job.work / "debug.py").write_text(
        "import os, sys\n"
        "print([stream.isatty() and stream.line_buffering for stream in (sys.stdin, sys.stdout, sys.stderr)])\n"
        "print('leads', os.tcgetpgrp(0) == os.getpid(), os.ttyname(0) == os.ttyname(1), os.ctermid())\n"
        "open('/dev/tty', 'w').write('by name\\n')\n"
        "secret = 6 * 7\n"
        "breakpoint()\n"
        "print('read', input('prompt> '))\n"
    )
    master, slave = pty.openpty()
    seen = b""

    def wait_for(text: str) -> None:
        nonlocal seen
        while text.encode() not in seen:
            assert select.select([master], [], [], 30)[0], seen
            seen += os.read(master, 65536)
        seen = seen.partition(text.encode())[2]

    try:
        running = distlaunch.start(
            ["train", "--num-procs", "1", *preload, "-x", "PYTHONUNBUFFERED=", "debug.py"],
            env={"TERM": "xterm"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=own_the_terminal,
        )
        wait_for("[True, True, True]")
        wait_for("leads True True /dev/tty")
        wait_for("by name")
        wait_for("(Pdb) ")
        os.write(master, b"p secret + 1\r")
        wait_for("43")
        wait_for("(Pdb) ")
        os.write(master, b"c\r")
        wait_for("prompt> ")
        os.write(master, b"typed\r")
        wait_for("read typed")
        running.wait_for(lambda: running.process.poll() is not None, "the end")
    finally:
        os.close(master)
        os.close(slave)
    result = running.wait()
    assert result.returncode == 0
    assert [event["problem"] for event in result.of_type("preload")] == ([None] if preload else [])


def test_sixty_workers_come_up(job, warm):
    result = warm("process_state.py", procs=60).wait()
    assert result.returncode == 0, result.stderr
    reported = [json.loads(job.sign(f"process-{rank}")) for rank in range(60)]
    assert len({each["pid"] for each in reported}) == 60
    assert {len(each["descriptors"]) for each in reported} == {len(reported[0]["descriptors"])}


def test_a_small_limit_of_open_files_is_enough(job, warm):
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    running = warm(
        "process_state.py",
        procs=12,
        preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, hard)),
    )
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert COLD not in result.stderr
    assert json.loads(job.sign("process-11"))["nofile"] == [24, hard]


def test_the_launchers_stdin_is_rank_0s(job, warm):
    (job.work / "echo.py").write_text(
        "import os, sys\nprint(os.environ['RANK'], repr(sys.stdin.read()))\n"
    )
    read, write = os.pipe()
    os.write(write, b"some\nlines")
    os.close(write)
    running = warm(job.work / "echo.py", stdin=read)
    os.close(read)
    result = running.wait()
    assert "[0] 0 'some\\nlines'" in result.stdout
    assert "[1] 1 ''" in result.stdout


def test_pipes_of_a_worker_are_its_own(job, warm):
    result = warm("process_state.py", procs=3).wait()
    assert result.returncode == 0
    seen = [json.loads(job.sign(f"process-{rank}"))["descriptors"] for rank in range(3)]
    for number in ("1", "2"):
        assert len({each[number] for each in seen}) == 3


def test_a_module_beside_the_script_can_be_preloaded(job, distlaunch):
    (job.work / "app").mkdir()
    (job.work / "app" / "beside.py").write_text("import os\nWHO = os.getpid()\n")
    (job.work / "app" / "main.py").write_text(
        "import os, sys\nprint('beside' in sys.modules)\nimport beside\nprint(beside.WHO != os.getpid())\n"
    )
    result = distlaunch.train(
        "--num-procs", "2", "--format", "plain", "--preload", "beside", "app/main.py"
    )
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert result.lines_of(rank) == ["True", "True"]


def test_a_setup_command_runs_once_for_the_server(job, warm):
    (job.work / "see.py").write_text(
        "import os, sys\nprint(os.environ['FROM_SETUP'], 'json' in sys.modules, os.environ['RANK'])\n"
    )
    result = warm(
        job.work / "see.py",
        options=["--setup", "export FROM_SETUP=yes; echo setting up; echo >> set-up"],
    ).wait()
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert result.lines_of(rank) == [f"yes True {rank}"]
    assert (job.work / "set-up").read_text() == "\n"
    assert stat.S_ISREG((job.work / "set-up").stat().st_mode)
