"""One worker has the terminal: its keys and signals, and stopping and continuing with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facts import mentions
from tests.launcher import PROGRAMS
from tests.process.conftest import state_of, until
from tests.process.terminal.conftest import COLUMNS, ROWS, script

# --- one worker has the terminal


def test_one_worker_has_a_terminal_of_the_users_size_and_what_it_shows_is_filed(
    distlaunch, screen, on_screen
):
    source = "size = os.get_terminal_size(0)\nprint([os.isatty(fd) for fd in range(3)], size.lines, size.columns, file=sys.stderr)"
    running = on_screen("--num-procs", "1", script(distlaunch, source))
    result = screen.read_until_end(running)
    assert result.returncode == 0
    expected = f"[True, True, True] {ROWS} {COLUMNS}"
    assert expected in screen.rendered()
    assert expected in (result.run_dir / "attempt-0" / "rank-0.log").read_text()


def test_a_new_size_of_the_window_reaches_the_worker(distlaunch, screen, on_screen):
    source = """
got = []
signal.signal(signal.SIGWINCH, lambda *_: got.append(1))
print("ready", flush=True)
while not got or os.get_terminal_size(0).columns != 77:
    time.sleep(0.01)
print("now", *os.get_terminal_size(0), flush=True)
"""
    running = on_screen("--num-procs", "1", script(distlaunch, source))
    screen.wait_text("ready")
    screen.resize(44, 77)
    screen.wait_text("now 77 44")
    assert screen.read_until_end(running).returncode == 0


def test_a_debugger_session_works(distlaunch, screen, on_screen):
    running = on_screen(
        "--num-procs", "1", script(distlaunch, "secret = 6 * 7\nbreakpoint()\nprint('went on')\n")
    )
    at = screen.wait_text("(Pdb) ")
    screen.type("p secret + 1\r")
    at = screen.wait_text("43", after=screen.wait_text("p secret + 1", after=at))
    at = screen.wait_text("(Pdb) ", after=at)
    screen.type("!secret = 'changed'\r")
    at = screen.wait_text("(Pdb) ", after=at)
    screen.type("secret\r")
    screen.wait_text("'changed'", after=screen.wait_text("secret", after=at))
    screen.type("c\r")
    screen.wait_text("went on")
    assert screen.read_until_end(running).returncode == 0
    assert "43" in (running.run_dir / "attempt-0" / "rank-0.log").read_text()


def test_typed_lines_reach_the_worker_and_control_d_ends_them(distlaunch, screen, on_screen):
    source = "print('ready', flush=True)\nprint('read', sys.stdin.readlines(), flush=True)\n"
    running = on_screen("--num-procs", "1", script(distlaunch, source))
    screen.wait_text("ready")
    screen.type("one\rtwo\r\x04")
    screen.wait_text("read ['one\\n', 'two\\n']")
    assert screen.read_until_end(running).returncode == 0


def test_control_c_interrupts_the_worker_and_the_job_ends_with_130(distlaunch, screen, on_screen):
    running = on_screen(
        "--num-procs", "1", script(distlaunch, "print('ready', flush=True)\ntime.sleep(600)\n")
    )
    screen.wait_text("ready")
    screen.type("\x03")
    result = screen.read_until_end(running)
    assert result.returncode == 130
    assert "KeyboardInterrupt" in screen.seen.decode()
    distlaunch.assert_no_survivors()


def test_a_worker_that_catches_control_c_goes_on(distlaunch, screen, on_screen):
    source = """
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("caught it", flush=True)
print("more:", sys.stdin.readline(), flush=True)
"""
    running = on_screen("--num-procs", "1", script(distlaunch, source))
    screen.wait_text("ready")
    screen.type("\x03")
    screen.wait_text("caught it")
    screen.type("on\r")
    screen.wait_text("more: on")
    assert screen.read_until_end(running).returncode == 0


def test_three_control_c_in_a_row_kill_a_worker_that_ignores_them(distlaunch, screen, on_screen):
    source = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(600)\n"
    running = on_screen("--num-procs", "1", script(distlaunch, source))
    screen.wait_text("ready")
    screen.type("\x03\x03\x03")
    result = screen.read_until_end(running)
    assert result.returncode in (130, 131, 137)
    distlaunch.assert_no_survivors()


ENDS = {
    "exit": ("pass", None, 0),
    "exit code": ("sys.exit(4)", None, 4),
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", None, 139),
    "SIGTERM": ("time.sleep(600)", signal.SIGTERM, 143),
    "SIGHUP": ("time.sleep(600)", signal.SIGHUP, 129),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_terminals_modes_are_restored_after(distlaunch, screen, on_screen, end):
    source, number, code = ENDS[end]
    # The worker leaves its own terminal in a bad state, as a crashed full-screen program would.
    raw = (
        "import tty\ntty.setraw(0)\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        if number is None
        else "print('ready', flush=True)\n"
    )
    running = on_screen("--num-procs", "1", script(distlaunch, raw + source))
    screen.wait_text("ready")
    assert screen.modes() != screen.modes_before, "the terminal passes keys on unread meanwhile"
    if number is None:
        screen.type("\n")
    else:
        running.send_signal(number)
    assert screen.read_until_end(running).returncode == code
    assert screen.modes() == screen.modes_before


@pytest.mark.parametrize("procs", ["1", "2"])
def test_control_z_stops_workers_and_launcher_and_fg_continues_both(
    distlaunch, screen, shell, procs
):
    source = """
import subprocess
child = subprocess.Popen(["sleep", "600"], close_fds=False)
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
child.kill()
child.wait()
print("went on", flush=True)
"""
    job = shell("--num-procs", procs, script(distlaunch, source))
    at = screen.wait_text("ready")
    until(lambda: len(distlaunch.holding()) == 2 * int(procs), "workers and their children run")
    workers = distlaunch.holding()
    screen.type("\x1a")
    assert job.reported().startswith("stopped")
    until(lambda: {state_of(pid) for pid in workers} == {"T"}, "all are stopped")
    assert state_of(job.launcher) == "T"
    assert screen.modes() == screen.modes_before
    (distlaunch.work / "go").touch()
    job.continue_job()
    screen.wait_text("went on", after=at)
    while screen.look(0.2):
        pass
    assert job.reported() == "ended 0"
    assert screen.modes() == screen.modes_before


def test_control_z_again_and_again(distlaunch, screen, shell):
    job = shell(
        "--num-procs",
        "1",
        script(distlaunch, "print('ready', flush=True)\nprint('read', sys.stdin.readline())\n"),
    )
    screen.wait_text("ready")
    for _ in range(3):
        until(lambda: screen.modes() != screen.modes_before, "the terminal is the worker's")
        screen.type("\x1a")
        assert job.reported().startswith("stopped")
        assert screen.modes() == screen.modes_before
        job.continue_job()
    until(lambda: screen.modes() != screen.modes_before, "the terminal is the worker's")
    screen.type("typed\r")
    screen.wait_text("read typed")
    while screen.look(0.2):
        pass
    assert job.reported() == "ended 0"


def test_a_failing_worker_on_a_terminal_is_explained_below_its_output(
    distlaunch, screen, on_screen
):
    running = on_screen(
        "--num-procs",
        "1",
        script(distlaunch, "def inner():\n    raise ValueError('seven is odd')\ninner()\n"),
    )
    result = screen.read_until_end(running)
    assert result.returncode == 1
    report = (result.run_dir / "report.txt").read_text().rstrip().splitlines()
    shown = [line.rstrip() for line in screen.rendered() if line.strip()]
    assert shown[-1] == report[-1]
    assert any("seven is odd" in line for line in report)


def test_the_last_lines_of_a_terminal_are_not_called_stderr(distlaunch, screen, on_screen):
    source = "print('name? ', end='', flush=True)\nsys.stdin.readline()\nprint('no', flush=True)\nos._exit(3)\n"
    running = on_screen("--num-procs", "1", script(distlaunch, source))
    screen.wait_text("name?")
    screen.type("typed\n")
    result = screen.read_until_end(running)
    report = (result.run_dir / "report.txt").read_text()
    assert mentions(report, "the terminal", "typed")
    assert "\n    name? typed\n" in report
    assert "stderr" not in report


def test_pasted_input_arrives_whole_although_the_worker_is_busy(distlaunch, screen, on_screen):
    source = """
import tty
tty.setraw(0)
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
left = 200_000
while left:
    left -= len(os.read(0, left))
print("all of it", flush=True)
"""
    on_screen("--num-procs", "1", script(distlaunch, source))
    screen.wait_text("ready")
    screen.type("x" * 100_000)
    (distlaunch.work / "go").touch()
    screen.type("x" * 100_000)
    screen.wait_text("all of it")


def test_input_before_the_start_of_the_worker_waits_for_it(distlaunch, screen, on_screen):
    on_screen(
        "--num-procs",
        "1",
        script(distlaunch, "print('got', repr(sys.stdin.readline()), flush=True)"),
    )
    screen.type("early\n")
    screen.wait_text("got 'early\\n'")


# --- several workers, or no terminal


def test_two_workers_get_no_terminal_and_no_input_of_it(distlaunch, screen, on_screen):
    source = "print([os.isatty(fd) for fd in range(3)], repr(sys.stdin.read()), flush=True)"
    result = screen.read_until_end(on_screen("--num-procs", "2", script(distlaunch, source)))
    assert result.returncode == 0
    for rank in (0, 1):
        assert (
            result.run_dir / "attempt-0" / f"rank-{rank}.log"
        ).read_text() == "[False, False, False] ''\n"


@pytest.mark.parametrize("procs", [1, 3])
def test_input_that_is_no_terminal_reaches_rank_0_and_the_others_read_its_end(distlaunch, procs):
    running = distlaunch.start(
        ["train", "--num-procs", str(procs), script(distlaunch, "print(repr(sys.stdin.read()))")],
        stdin=subprocess.PIPE,
    )
    running.stdin.write(b"piped text\n")
    running.stdin.close()
    result = running.wait()
    logs = [
        (result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text() for rank in range(procs)
    ]
    assert logs == ["'piped text\\n'\n"] + ["''\n"] * (procs - 1)


def test_a_terminal_behind_a_pipe_is_not_handed_over(distlaunch, screen, on_screen):
    source = "print([os.isatty(fd) for fd in range(3)])"
    running = on_screen("--num-procs", "1", script(distlaunch, source), stdout=subprocess.PIPE)
    out = running.process.stdout.read()
    assert screen.read_until_end(running).returncode == 0
    assert out == b"[0] [False, False, False]\n"


@pytest.mark.parametrize("size", [64, 1 << 20], ids=["one line", "1 MB"])
def test_the_worker_with_the_terminal_prints_and_saves_after_kill_9_of_the_launcher(
    distlaunch, screen, on_screen, size
):
    """Its terminal stays until it has ended. Otherwise it would get HUP, and an error when it
    prints."""
    program = PROGRAMS / "prints_at_the_end.py"
    running = on_screen(
        "--num-procs", "1", "--failure-grace", "60", program, str(size), cwd=distlaunch.work
    )
    until((distlaunch.work / "ready-0").exists, "the worker")
    running.process.kill()
    distlaunch.assert_no_survivors(within_s=60)
    log = running.run_dir / "attempt-0" / "rank-0.log"
    assert (distlaunch.work / "saved-0").exists(), log.read_text()
    words = ("saving 0".ljust(63, "."), "saved 0", "done 0")
    until(lambda: [*map(log.read_text().count, words)] == [size // 64, 1, 1], "all in the log")


def test_after_kill_9_of_the_launcher_the_shell_has_its_terminal_as_it_was(distlaunch, screen):
    """The launcher passes each key on meanwhile. Its parent goes on with the terminal."""
    program = script(distlaunch, "print('ready', flush=True)\nsignal.pause()\n")
    train = [
        sys.executable,
        "-m",
        "distlaunch",
        "train",
        "--num-procs",
        "1",
        "--failure-grace",
        "1",
        program,
    ]
    words = ["sh", "-c", '"$@"; read line; echo "read $line"', "sh", *map(str, train)]
    shell = subprocess.Popen(words, env=distlaunch.env, cwd=distlaunch.work, **screen.streams())
    try:
        screen.wait_text("ready")
        until(lambda: screen.modes() != screen.modes_before, "the launcher's modes")
        [launcher] = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
        os.kill(int(launcher), signal.SIGKILL)
        until(lambda: screen.modes() == screen.modes_before, "the modes from before")
        screen.type("typed\r")
        screen.wait_text("read typed")
        assert shell.wait(30) == 0
    finally:
        shell.kill()
        shell.wait()
    distlaunch.assert_no_survivors(within_s=30)
