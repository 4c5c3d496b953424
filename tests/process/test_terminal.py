"""The launcher on real terminals: handed over to one worker, shared by several, stopped, closed, and given back."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"
SHELL, LINES = PROGRAMS / "output_shell.py", PROGRAMS / "output_lines.py"
ROWS, COLUMNS = 30, 200
HOLD = f"import os, signal, sys, time\nsys.path.insert(0, {str(PROGRAMS)!r})\nimport survivor\nsurvivor.hold()\n"


def _as_a_login_shell_starts_it() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # whatever pytest was started with
        signal.signal(number, signal.SIG_DFL)


class Screen:
    """A terminal: the test is its keyboard and its eyes."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(ROWS, COLUMNS)
        self.seen = b""
        self.modes_before = self.modes()

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def modes(self) -> list[object]:
        modes = termios.tcgetattr(self.slave)
        # The pending-input flag is the kernel's own: it sets it when canonical mode comes back.
        modes[3] &= ~getattr(termios, "PENDIN", 0)
        return modes

    def streams(self) -> dict[str, object]:
        """Make this the controlling terminal and the three streams of a process of its own session."""
        return {
            "stdin": self.slave,
            "stdout": self.slave,
            "stderr": self.slave,
            "start_new_session": True,
            "preexec_fn": _as_a_login_shell_starts_it,
        }

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def look(self, timeout_s: float = 0.0) -> bool:
        """Read what is there; tell whether there was something."""
        if not select.select([self.master], [], [], timeout_s)[0]:
            return False
        self.seen += os.read(self.master, 1 << 16)
        return True

    def wait_text(self, text: str, *, after: int = 0, timeout_s: float = 30.0) -> int:
        """Read until ``text`` has come, and return the place behind it."""
        deadline = time.monotonic() + timeout_s
        while (at := self.seen.find(text.encode(), after)) < 0:
            if not self.look(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                pytest.fail(f"no {text!r} on the terminal:\n{self.seen[-3000:].decode(errors='replace')}")
        return at + len(text.encode())

    def read_until_end(self, running, timeout_s: float = 40.0):
        """Read on until the launcher has ended, so that it never waits for us; return how it ended."""
        deadline = time.monotonic() + timeout_s
        while running.process.poll() is None and time.monotonic() < deadline:
            self.look(0.02)
        while self.look():
            pass
        return running.wait(1)

    def rendered(self) -> list[str]:
        """Draw what has come: text, carriage returns, newlines, erasing and colours are all that may be there."""
        lines, column = [""], 0
        for token in re.findall(
            r"\x1b\[[0-9;:?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+|\x1b", self.seen.decode(errors="replace")
        ):
            if token == "\r":
                column = 0
            elif token == "\n":
                lines.append("")
            elif token.startswith("\x1b"):
                assert token[-1] in "mK", f"a terminal was sent {token!r}"
                if token[-1] == "K":
                    lines[-1] = lines[-1][:column]
            else:
                lines[-1] = lines[-1][:column] + token + lines[-1][column + len(token) :]
                column += len(token)
        return lines

    def close(self) -> None:
        for end in (self.master, self.slave):
            try:
                os.close(end)
            except OSError:
                continue


@pytest.fixture
def screen():
    screen = Screen()
    yield screen
    screen.close()


@pytest.fixture
def on_screen(distlaunch, screen):
    """Start ``train`` on the terminal."""

    def start(*args, **kwargs):
        env = {"TERM": "xterm", **kwargs.pop("env", {})}
        return distlaunch.start(["train", *args], env=env, **{**screen.streams(), **kwargs})

    return start


class Shell:
    """The launcher as the foreground job of a shell."""

    def __init__(self, distlaunch, screen: Screen, *args: str) -> None:
        self.mine, theirs = socket.socketpair()
        self.mine.settimeout(40)
        self._text = b""
        command = [sys.executable, str(SHELL), str(theirs.fileno()), sys.executable, "-m", "distlaunch", "train", *args]
        self.process = subprocess.Popen(
            command,
            env={**distlaunch.env, "TERM": "xterm"},
            cwd=distlaunch.work,
            pass_fds=(theirs.fileno(),),
            **screen.streams(),
        )
        theirs.close()
        self.launcher = int(self.told().split()[1])

    def told(self) -> str:
        while b"\n" not in self._text:
            part = self.mine.recv(100)
            assert part, "the shell has ended"
            self._text += part
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()

    def continue_job(self) -> None:
        self.mine.sendall(b"fg\n")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.mine.close()


@pytest.fixture
def shell(distlaunch, screen):
    shells: list[Shell] = []

    def start(*args: str) -> Shell:
        shells.append(Shell(distlaunch, screen, *args))
        return shells[-1]

    yield start
    for one in shells:
        one.close()


def script(distlaunch, source: str) -> str:
    path = distlaunch.work / "worker.py"
    path.write_text(HOLD + source)
    return str(path)


def states(pids: list[int]) -> set[str]:
    found = set()
    for pid in pids:
        try:
            found.add(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue
    return found


def wait_until(condition, what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# --- one worker has the terminal


def test_one_worker_has_a_terminal_of_the_users_size_and_what_it_shows_is_filed(distlaunch, screen, on_screen):
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
    running = on_screen("--num-procs", "1", script(distlaunch, "secret = 6 * 7\nbreakpoint()\nprint('went on')\n"))
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
    running = on_screen("--num-procs", "1", script(distlaunch, "print('ready', flush=True)\ntime.sleep(600)\n"))
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
def test_control_z_stops_workers_and_launcher_and_fg_continues_both(distlaunch, screen, shell, procs):
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
    wait_until(lambda: len(distlaunch.holding()) == 2 * int(procs), "workers and their children run")
    workers = distlaunch.holding()
    screen.type("\x1a")
    assert job.told().startswith("stopped")
    wait_until(lambda: states(workers) == {"T"}, f"all are stopped: {states(workers)}")
    assert states([job.launcher]) == {"T"}
    assert screen.modes() == screen.modes_before
    (distlaunch.work / "go").touch()
    job.continue_job()
    screen.wait_text("went on", after=at)
    while screen.look(0.2):
        pass
    assert job.told() == "ended 0"
    assert screen.modes() == screen.modes_before


def test_control_z_again_and_again(distlaunch, screen, shell):
    job = shell(
        "--num-procs", "1", script(distlaunch, "print('ready', flush=True)\nprint('read', sys.stdin.readline())\n")
    )
    screen.wait_text("ready")
    for _ in range(3):
        wait_until(lambda: screen.modes() != screen.modes_before, "the terminal is the worker's")
        screen.type("\x1a")
        assert job.told().startswith("stopped")
        assert screen.modes() == screen.modes_before
        job.continue_job()
    wait_until(lambda: screen.modes() != screen.modes_before, "the terminal is the worker's")
    screen.type("typed\r")
    screen.wait_text("read typed")
    while screen.look(0.2):
        pass
    assert job.told() == "ended 0"


def test_a_failing_worker_on_a_terminal_is_explained_below_its_output(distlaunch, screen, on_screen):
    running = on_screen(
        "--num-procs", "1", script(distlaunch, "def inner():\n    raise ValueError('seven is odd')\ninner()\n")
    )
    result = screen.read_until_end(running)
    assert result.returncode == 1
    report = (result.run_dir / "report.txt").read_text().rstrip().splitlines()
    shown = [line.rstrip() for line in screen.rendered() if line.strip()]
    assert shown[-1] == report[-1]
    assert any("seven is odd" in line for line in report)


# --- several workers, or no terminal


def test_two_workers_get_no_terminal_and_no_input_of_it(distlaunch, screen, on_screen):
    source = "print([os.isatty(fd) for fd in range(3)], repr(sys.stdin.read()), flush=True)"
    result = screen.read_until_end(on_screen("--num-procs", "2", script(distlaunch, source)))
    assert result.returncode == 0
    for rank in (0, 1):
        assert (result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text() == "[False, False, False] ''\n"


@pytest.mark.parametrize("procs", [1, 3])
def test_input_that_is_no_terminal_reaches_rank_0_and_the_others_meet_its_end(distlaunch, procs):
    running = distlaunch.start(
        ["train", "--num-procs", str(procs), script(distlaunch, "print(repr(sys.stdin.read()))")], stdin=subprocess.PIPE
    )
    running.stdin.write(b"piped text\n")
    running.stdin.close()
    result = running.wait()
    logs = [(result.run_dir / "attempt-0" / f"rank-{rank}.log").read_text() for rank in range(procs)]
    assert logs == ["'piped text\\n'\n"] + ["''\n"] * (procs - 1)


def test_a_terminal_behind_a_pipe_is_not_handed_over(distlaunch, screen, on_screen):
    source = "print([os.isatty(fd) for fd in range(3)])"
    running = on_screen("--num-procs", "1", script(distlaunch, source), stdout=subprocess.PIPE)
    out = running.process.stdout.read()
    assert screen.read_until_end(running).returncode == 0
    assert out == b"[0] [False, False, False]\n"


# --- what a terminal shows


def test_escape_sequences_cannot_touch_the_terminal_and_are_filed(distlaunch, screen, on_screen):
    hostile = b"\x1b]0;evil title\x07\x1b[2J\x1b[5;5H\x1b[?1049h\x9b2J\x1bc\x1b[31mred\x1b[0m\n"
    running = on_screen("--num-procs", "2", script(distlaunch, f"os.write(1, {hostile!r})"))
    result = screen.read_until_end(running)
    screen.rendered()  # fails on all but colours and erase-in-line
    text = screen.seen.decode()  # UTF-8 throughout, so that no byte of it is an 8-bit control
    for harmful in ("\x1b]", "\x1b[2J", "\x1bc", "\x1b[5;5H", "\x1b[?1049h", "\x9b", "\x07"):
        assert harmful not in text
    assert b"\x1b[31mred" in screen.seen
    assert (result.run_dir / "attempt-0" / "rank-1.log").read_bytes() == hostile


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_is_for_terminals_that_want_it(distlaunch, screen, on_screen, env, coloured):
    running = on_screen("--num-procs", "2", script(distlaunch, "print('line of', os.environ['RANK'])"), env=env)
    assert screen.read_until_end(running).returncode == 0
    assert bool(re.search(rb"\x1b\[[0-9;]+m", screen.seen)) == coloured
    assert any(line.endswith("[1] line of 1") for line in screen.rendered())


def test_the_status_line_tells_of_the_job_and_leaves_no_trace(distlaunch, screen, on_screen):
    source = "print('begun', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done', flush=True)"
    running = on_screen("--num-procs", "2", script(distlaunch, source))
    screen.wait_text("2/2 workers up")
    assert str(running.run_dir) in screen.rendered()[-1]
    (distlaunch.work / "go").touch()
    assert screen.read_until_end(running).returncode == 0
    lines = screen.rendered()
    assert not any("workers up" in line for line in lines)
    assert lines[-1] == ""
    assert {line for line in lines if line.startswith("[")} <= {"[0-1] begun", "[0-1] done", *(f"[{r}] {w}" for r in (0, 1) for w in ("begun", "done"))}  # fmt: skip


# --- terminals that stop or go away


def test_a_stopped_terminal_skips_lines_and_says_how_many(distlaunch, screen, on_screen):
    source = """
for number in range(60_000):
    os.write(1, b"%s %d " % (os.environ["RANK"].encode(), number) + b"s" * 80 + b"\\n")
open("written-" + os.environ["RANK"], "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
"""
    running = on_screen("--num-procs", "2", script(distlaunch, source))
    written = [distlaunch.work / f"written-{rank}" for rank in (0, 1)]
    running.wait_for(lambda: all(path.exists() for path in written), "workers that go on though nobody reads")
    screen.wait_text("lines not shown")
    (distlaunch.work / "go").touch()
    result = screen.read_until_end(running)
    assert result.returncode == 0
    text = screen.seen.decode(errors="replace")
    shown = set(re.findall(r"\[([01])\] \1 (\d+) s{80}", re.sub(r"\x1b\[[0-9;]*m", "", text)))
    skipped = sum(int(count.replace(",", "")) for count in re.findall(r"… ([\d,]+) lines? not shown", text))
    assert len(shown) + skipped == 120_000
    for rank in (0, 1):
        assert len((result.run_dir / "attempt-0" / f"rank-{rank}.log").read_bytes().splitlines()) == 60_000


@pytest.mark.parametrize("code", [0, 5])
def test_a_job_on_a_terminal_that_nobody_reads_ends_with_its_code(distlaunch, screen, on_screen, code):
    running = on_screen("--num-procs", "2", "--failure-grace", "1", str(LINES), "40000", "80", str(code))
    result = running.wait(30)
    assert result.returncode == code
    assert [event["exit_code"] for event in result.of_type("job_ended")] == [code]
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("procs", ["1", "2"])
def test_a_terminal_that_goes_away_ends_the_job_with_129(distlaunch, screen, on_screen, procs):
    running = on_screen("--num-procs", procs, script(distlaunch, "print('ready', flush=True)\ntime.sleep(600)\n"))
    screen.wait_text("ready")
    screen.close()
    result = running.wait(30)
    assert result.returncode == 129
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("procs", ["1", "2"])
def test_under_nohup_the_job_outlives_its_terminal(distlaunch, screen, on_screen, procs):
    source = "print('ready', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nfor _ in range(1000): print('on' * 100)\n"

    def nohup() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    running = on_screen("--num-procs", procs, script(distlaunch, source), preexec_fn=nohup)
    screen.wait_text("ready")
    screen.close()
    (distlaunch.work / "go").touch()
    result = running.wait(30)
    assert result.returncode == 0
    assert (result.run_dir / "attempt-0" / "rank-0.log").read_bytes().count(b"on") >= 1000


def test_what_is_pasted_arrives_whole_although_the_worker_is_busy(distlaunch, screen, on_screen):
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


def test_what_is_typed_before_the_worker_is_there_waits_for_it(distlaunch, screen, on_screen):
    on_screen("--num-procs", "1", script(distlaunch, "print('got', repr(sys.stdin.readline()), flush=True)"))
    screen.type("early\n")
    screen.wait_text("got 'early\\n'")


def test_jsonl_on_a_stopped_terminal_does_not_keep_the_launcher(distlaunch, on_screen):
    source = "for number in range(3000):\n    print('x' * 100, number)"
    running = on_screen("--num-procs", "2", "--format", "jsonl", script(distlaunch, source))
    assert running.wait().returncode == 0
