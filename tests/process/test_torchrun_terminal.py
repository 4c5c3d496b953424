"""``distlaunch torchrun`` with several workers on a terminal: rank 0 reads the input, as torchrun's
workers can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.process.conftest import later_than_a_double

CTRL_Z, CTRL_C = b"\x1a", b"\x03"

DEBUGS = """
import os, signal
rank = os.environ["RANK"]
open(".pid-" + rank, "w").write(str(os.getpid()))
os.replace(".pid-" + rank, "pid-" + rank)  # whole, from when it is there
if rank == "0":
    x = 3
    breakpoint()
    print("went on")
else:
    import sys
    print("rank 1 read", repr(sys.stdin.read()))
    while not os.path.exists("go"):
        signal.sigtimedwait((), 0.02)
"""


@pytest.fixture
def debugging(job, shell_job, distlaunch):
    """Start two workers in the foreground of a terminal, of which rank 0 stops in pdb."""

    class Debugging:
        def start(self, *words: str, source: str = DEBUGS) -> None:
            (distlaunch.work / "train.py").write_text(source)
            self.shell, self.terminal = shell_job(
                "torchrun", "--nproc-per-node", "2", "--log-dir", "logs", *words, "train.py"
            )
            self.sees("(Pdb) ")

        def shown(self, rank: int = 0) -> str:
            return "".join(
                path.read_text()
                for path in distlaunch.work.glob(f"logs/*/attempt_0/{rank}/stdout.log")
            )

        def sees(self, text: str, rank: int = 0) -> None:
            job.until(lambda: text in self.shown(rank), f"rank {rank} writes {text!r}")

        def type(self, keys: bytes) -> None:
            os.write(self.terminal, keys)

    return Debugging()


@pytest.mark.parametrize("words", [(), ("--tee", "3"), ("--local-ranks-filter", "0")], ids=str)
def test_pdb_in_rank_0_gets_what_is_typed_and_the_other_rank_nothing(debugging, job, words):
    debugging.start(*words)
    debugging.sees("rank 1 read ''", rank=1)
    debugging.type(b"p x + 39\n")
    debugging.sees("42")
    job.put_sign("go")
    debugging.type(b"c\n")
    assert debugging.shell.wait(30) == 0
    assert "went on" in debugging.shown()


def test_pdb_of_a_warm_worker_gets_it_too(debugging, job, distlaunch):
    distlaunch.env["DISTLAUNCH_PRELOAD"] = "json"
    debugging.start(source="import sys\nassert 'json' in sys.modules\n" + DEBUGS)
    job.put_sign("go")
    debugging.type(b"p x + 39\nc\n")
    assert debugging.shell.wait(30) == 0
    assert "42" in debugging.shown()


def test_a_second_ctrl_c_ends_the_job_while_pdb_waits(debugging, job):
    debugging.start()
    workers = [int(job.sign(f"pid-{rank}")) for rank in (0, 1)]
    debugging.type(CTRL_C)
    debugging.sees("--KeyboardInterrupt--")
    later_than_a_double()
    debugging.type(CTRL_C)
    assert debugging.shell.wait(30) == 130
    assert not any(map(job.is_alive, workers))


def test_ctrl_z_stops_the_job_while_pdb_waits_and_after_fg_it_still_has_the_keys(debugging, job):
    debugging.start()
    workers = [int(job.sign(f"pid-{rank}")) for rank in (0, 1)]
    debugging.type(CTRL_Z)
    job.until(lambda: job.has_sign("stopped-1"), "the shell has seen the launcher stop")
    assert int(job.sign("stopped-1")) == signal.SIGTSTP
    job.until(lambda: all(job.state_of(pid) == "T" for pid in workers), "the workers are stopped")
    job.put_sign("fg-1")
    job.until(lambda: all(job.state_of(pid) != "T" for pid in workers), "the workers go on")
    job.put_sign("go")
    debugging.type(b"p x + 39\nc\n")
    assert debugging.shell.wait(30) == 0
    assert "42" in debugging.shown()


def test_in_the_background_nobody_takes_what_the_shell_is_typed(distlaunch):
    (distlaunch.work / "train.py").write_text(
        "import os, sys; print(os.isatty(0), repr(sys.stdin.read()))"
    )
    master, slave = os.openpty()
    shell = (
        "import os, subprocess, sys, fcntl, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "words = [sys.executable, '-m', 'distlaunch', 'torchrun', '--nproc-per-node=2', 'train.py']\n"
        "job = subprocess.Popen(words, preexec_fn=os.setpgrp, stdout=subprocess.PIPE)\n"
        "out = job.communicate()[0]\n"
        "open('out', 'wb').write(out)\n"
        "sys.exit(job.returncode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", shell],
        stdin=slave,
        capture_output=True,
        cwd=distlaunch.work,
        env=distlaunch.env,
        start_new_session=True,
        timeout=60,
    )
    os.close(slave)
    os.close(master)
    assert done.returncode == 0, done.stderr
    assert (distlaunch.work / "out").read_text() == "False ''\n" * 2
