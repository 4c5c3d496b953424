"""Output on a terminal, and terminals that stop, close or hang up."""

from __future__ import annotations

import fcntl
import re
import signal
import termios

import pytest

from tests.launcher import PROGRAMS
from tests.process.terminal.conftest import script

LINES = PROGRAMS / "output_lines.py"


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


@pytest.mark.parametrize(
    ("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_is_for_terminals_that_want_it(distlaunch, screen, on_screen, env, coloured):
    running = on_screen(
        "--num-procs", "2", script(distlaunch, "print('line of', os.environ['RANK'])"), env=env
    )
    assert screen.read_until_end(running).returncode == 0
    assert bool(re.search(rb"\x1b\[[0-9;]+m", screen.seen)) == coloured
    assert any(line.endswith("[1] line of 1") for line in screen.rendered())


def test_the_status_line_shows_the_job_and_leaves_no_trace(distlaunch, screen, on_screen):
    source = "print('begun', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done', flush=True)"
    running = on_screen("--num-procs", "2", script(distlaunch, source))
    screen.wait_text("2/2 workers up")
    assert str(running.run_dir) in screen.rendered()[-1]
    (distlaunch.work / "go").touch()
    assert screen.read_until_end(running).returncode == 0
    lines = screen.rendered()
    assert not any("workers up" in line for line in lines)
    assert lines[-1] == ""
    assert {line for line in lines if line.startswith("[")} <= {
        "[0-1] begun",
        "[0-1] done",
        *(f"[{r}] {w}" for r in (0, 1) for w in ("begun", "done")),
    }


# --- terminals that stop or go away


def test_a_stopped_terminal_skips_lines_and_shows_how_many(distlaunch, screen, on_screen):
    source = """
for number in range(60_000):
    os.write(1, b"%s %d " % (os.environ["RANK"].encode(), number) + b"s" * 80 + b"\\n")
open("written-" + os.environ["RANK"], "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
"""
    running = on_screen("--num-procs", "2", script(distlaunch, source))
    written = [distlaunch.work / f"written-{rank}" for rank in (0, 1)]
    running.wait_for(
        lambda: all(path.exists() for path in written), "workers that go on though nobody reads"
    )
    screen.wait_text("lines not shown")
    (distlaunch.work / "go").touch()
    result = screen.read_until_end(running)
    assert result.returncode == 0
    text = screen.seen.decode(errors="replace")
    shown = set(re.findall(r"\[([01])\] \1 (\d+) s{80}", re.sub(r"\x1b\[[0-9;]*m", "", text)))
    skipped = sum(
        int(count.replace(",", "")) for count in re.findall(r"… ([\d,]+) lines? not shown", text)
    )
    assert len(shown) + skipped == 120_000
    for rank in (0, 1):
        assert (
            len((result.run_dir / "attempt-0" / f"rank-{rank}.log").read_bytes().splitlines())
            == 60_000
        )


@pytest.mark.parametrize("code", [0, 5])
def test_a_job_on_a_terminal_that_nobody_reads_ends_with_its_code(
    distlaunch, screen, on_screen, code
):
    running = on_screen(
        "--num-procs", "2", "--failure-grace", "1", str(LINES), "40000", "80", str(code)
    )
    result = running.wait(30)
    assert result.returncode == code
    assert [event["exit_code"] for event in result.of_type("job_ended")] == [code]
    distlaunch.assert_no_survivors()


@pytest.mark.parametrize("procs", ["1", "2"])
def test_a_terminal_that_goes_away_ends_the_job_with_129(distlaunch, screen, on_screen, procs):
    running = on_screen(
        "--num-procs", procs, script(distlaunch, "print('ready', flush=True)\ntime.sleep(600)\n")
    )
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


def test_jsonl_on_a_stopped_terminal_does_not_keep_the_launcher(distlaunch, on_screen):
    source = "for number in range(3000):\n    print('x' * 100, number)"
    running = on_screen("--num-procs", "2", "--format", "jsonl", script(distlaunch, source))
    assert running.wait().returncode == 0
