from __future__ import annotations

import os
import socket
import tracemalloc

import pytest

from distlaunch.console.terminal_writer import TerminalWriter
from distlaunch.coordinator.runtime.sink import StatusView


def view(**changes) -> StatusView:
    values = {
        "phase": "running",
        "workers_up": 4,
        "workers_total": 4,
        "attempt": 0,
        "restarts": 0,
        "max_restarts": 0,
        "started_s": 0.0,
        "log_dir": "/logs/job",
    }
    return StatusView(**{**values, **changes})


# --- lines and hostile output


def test_a_crlf_is_a_line_end(screen):
    one = screen(world_size=1)
    one.console.output(0, 1, b"a\r\nb\r", 0.0)
    one.console.output(0, 1, b"\nc\r\n", 0.1)
    assert one.read() == b"[0] a\n[0] b\n[0] c\n"


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x1b]0;owned\x07",
        b"\x1b[2J\x1b[H",
        b"\x1b[6n",
        b"\x1bPq\x1b\\",
        "\x9b2J".encode(),
        b"\x1b[31mred \x1b[8;9;9t",
    ],
)
def test_escapes_split_at_any_place_do_not_get_through(screen, hostile):
    for cut in range(len(hostile) + 1):
        one = screen(world_size=1)
        one.console.output(0, 1, b"x" + hostile[:cut], 0.0)
        one.console.tick(0.5)
        one.console.output(0, 1, hostile[cut:], 0.6)
        one.console.tick(1.1)
        one.console.output(0, 1, b"y\n", 1.2)
        shown = one.read()
        rest = shown.replace(b"\x1b[31m", b"").replace(b"\x1b[0m", b"")
        assert b"\x1b" not in rest
        assert b"\x9b" not in rest.replace("␛".encode(), b"")
        assert b"\x07" not in rest
        assert rest.endswith(b"y\n")


def test_colours_pass_and_end_with_their_line(screen):
    one = screen(world_size=1)
    one.console.output(0, 1, b"\x1b[31mred\nplain\n\x1b[32m", 0.0)
    one.console.output(0, 1, b"green", 0.0)
    one.console.tick(0.5)
    one.console.output(0, 2, b"other\n", 0.6)
    assert one.read() == b"[0] \x1b[31mred\x1b[0m\n[0] plain\n[0] \x1b[32mgreen\x1b[0m\n[0] other\n"


def test_a_split_colour_survives_a_partial_line(screen):
    one = screen(world_size=1)
    one.console.output(0, 1, b"go \x1b[3", 0.0)
    one.console.tick(0.5)
    one.console.output(0, 1, b"2mgreen\n", 0.6)
    assert one.read() == b"[0] go \x1b[32mgreen\x1b[0m\n"


def test_binary_is_shown_harmlessly(screen):
    one = screen(world_size=1)
    one.console.output(0, 1, bytes(range(256)).replace(b"\r", b"") + b"\n", 0.0)
    shown = one.read()
    assert b"\x1b" not in shown
    assert b"\x00" not in shown
    shown.decode()


def test_a_line_of_32_megabytes_is_cut_and_takes_little_memory(screen):
    one = screen(world_size=1)
    tracemalloc.start()
    try:
        for _ in range(512):
            one.console.output(0, 1, b"y" * (64 << 10), 0.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    one.console.output(0, 1, b"\nnext\n", 0.0)
    shown = one.read()
    assert peak < 4 << 20
    assert (
        shown == b"[0] " + b"y" * (64 << 10) + "… line continues, see the log\n[0] next\n".encode()
    )


def test_a_long_line_in_one_chunk_is_cut_too(screen):
    one = screen(world_size=1)
    one.console.output(0, 1, b"a\n" + b"y" * 100_000 + b"\nb\n", 0.0)
    shown = one.read()
    assert (
        shown
        == b"[0] a\n[0] " + b"y" * (64 << 10) + "… line continues, see the log\n[0] b\n".encode()
    )


# --- colour


def test_prefixes_and_our_own_lines_are_coloured_on_a_terminal(screen):
    one = screen(world_size=1, environ={})
    one.console.output(0, 1, b"x\n", 0.0)
    one.console.say("a\n\nb", level="error")
    assert one.read() == b"\x1b[36m[0]\x1b[0m x\n\x1b[31mdistlaunch: a\x1b[0m\n\nb\n"


@pytest.mark.parametrize(
    "options", [{"environ": {"NO_COLOR": "0"}}, {"format": "plain", "environ": {}}]
)
def test_no_colour_when_not_wanted(screen, options):
    one = screen(world_size=1, **options)
    one.console.output(0, 1, b"x\n", 0.0)
    one.console.say("y", level="error")
    assert one.read() == b"[0] x\ndistlaunch: y\n"


def test_an_empty_no_color_means_nothing(screen):
    one = screen(world_size=1, environ={"NO_COLOR": ""})
    one.console.say("y", level="warning")
    assert one.read() == b"\x1b[33mdistlaunch: y\x1b[0m\n"


def test_our_own_text_cannot_carry_escapes_either(screen):
    one = screen(world_size=1)
    one.console.say("path \x1b]0;t\x07")
    assert one.read() == b"distlaunch: path \\x1b]0;t\\x07\n"


def test_a_dumb_terminal_gets_no_escapes_from_us(screen):
    one = screen(world_size=1, environ={"TERM": "dumb"})
    one.console.status(view())
    one.console.output(0, 1, b"\r 0%", 0.0)
    one.console.tick(0.5)
    one.console.output(0, 1, b"\r 1%\n", 0.6)
    one.console.say("careful", level="warning")
    assert one.read() == b"[0]  0%\n[0]  1%\ndistlaunch: careful\n"


# --- the status line


def test_the_status_line_is_last_and_makes_way_for_output(screen):
    one = screen(world_size=1)
    one.console.status(view())
    line = "distlaunch: 4/4 workers up · attempt 0 · 00:00 · /logs/job".encode()
    assert one.terminal.wait_for(b"/logs/job") == line
    one.console.output(0, 1, b"hello\n", 0.0)
    one.terminal.wait_for(b"\r\x1b[K[0] hello\n" + line)
    assert one.read() == line + b"\r\x1b[K[0] hello\n" + line + b"\r\x1b[K"


def test_the_status_line_ticks_once_a_second_while_it_is_shown(screen):
    one = screen(world_size=1)
    assert one.console.tick(0.0) is None
    woken = []
    one.console.on_room(lambda: woken.append(True))
    one.console.status(view())
    assert woken
    assert one.console.tick(0.3) == 1.0
    assert one.console.tick(61.0) == 62.0
    one.terminal.wait_for(b"\xc2\xb7 01:01 \xc2\xb7")
    one.console.status(view(phase="ended"))
    assert one.console.tick(63.0) is None


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (59, "distlaunch: 4/4 workers up · attempt 0 · 00:00 · /logs/job"),
        (58, "distlaunch: 4/4 workers up · attempt 0 · 00:00"),
        (30, "distlaunch: 4/4 workers up"),
        (20, "distlaunch: 4/4 wo…"),
    ],
)
def test_of_a_status_line_wider_than_the_terminal_the_path_goes_first_and_parts_go_whole(
    screen, columns, shown
):
    one = screen(world_size=1, columns=columns)
    one.console.status(view())
    assert one.terminal.wait_for(shown.encode()).decode() == shown
    one.console.status(view(phase="ended"))
    assert one.terminal.wait_for(b"\r\x1b[K").decode() == shown + "\r\x1b[K"


def test_the_status_line_shows_odd_bytes_and_controls_of_a_path(screen):
    one = screen(world_size=1)
    one.console.status(view(log_dir="/l\udcff\x1b[2J"))
    assert one.terminal.wait_for(b"2J").endswith(rb"/l\xff\x1b[2J")


def test_suspending_clears_the_status_line_and_resuming_draws_it(screen):
    one = screen(world_size=1)
    one.console.status(view())
    one.terminal.wait_for(b"job")
    one.console.suspend()
    assert one.terminal.wait_for(b"\r\x1b[K").endswith(b"job\r\x1b[K")
    assert one.console.tick(5.0) is None
    one.console.status(view(phase="stopping"))
    one.console.output(0, 1, b"x\n", 0.0)
    assert one.terminal.wait_for(b"[0] x\n").endswith(b"\r\x1b[K[0] x\n")
    one.console.resume()
    one.terminal.wait_for(b"distlaunch: stopping")


def test_no_status_line_stands_in_an_unfinished_line(screen):
    one = screen(world_size=1)
    one.console.output(0, 1, b"prompt> ", 0.0)
    one.console.tick(0.5)
    one.terminal.wait_for(b"prompt> ")
    one.console.status(view())
    one.console.output(0, 1, b"answer", 0.6)
    assert one.terminal.wait_for(b"answer") == b"[0] prompt> answer"
    one.console.output(0, 1, b"\n", 0.7)
    one.terminal.wait_for(b"distlaunch: 4/4")


@pytest.mark.parametrize("options", [{"format": "plain"}, {"quiet": True}])
def test_no_status_line_when_not_wanted(screen, options):
    one = screen(world_size=1, **options)
    one.console.status(view())
    assert one.console.tick(0.0) is None
    assert one.read() == b""


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_no_status_line_when_a_program_reads_stdout_and_may_write_to_the_terminal(screen, kind):
    ends = os.pipe() if kind == "pipe" else [end.detach() for end in socket.socketpair()]
    one = screen(world_size=1, stdout_fd=ends[1])
    one.console.status(view())
    assert one.console.tick(0.0) is None
    one.console.say("ours")
    assert one.read() == b"distlaunch: ours\n"
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("kind", ["file", "null"])
def test_a_status_line_when_stdout_goes_where_nobody_reads(screen, tmp_path, kind):
    target = os.open(tmp_path / "out" if kind == "file" else os.devnull, os.O_WRONLY | os.O_CREAT)
    one = screen(world_size=1, stdout_fd=target)
    one.console.status(view())
    one.terminal.wait_for(b"distlaunch: 4/4")
    one.read()
    os.close(target)


# --- a stopped terminal


def test_a_stopped_terminal_skips_lines_and_shows_how_many(screen):
    one = screen(world_size=1)
    one.terminal.stop()
    total = 40_000
    for number in range(total):
        one.console.output(0, 1, b"%060d\n" % number, 0.0)
        assert one.console.has_room()
    one.console.say("still here", level="error")
    one.terminal.go_on()
    one.terminal.wait_for(b"still here\n")
    one.console.output(0, 1, b"last\n", 0.0)
    lines = one.read().split(b"\n")[:-1]
    notes = [line for line in lines if line.startswith("…".encode())]
    assert len(notes) == 1
    skipped = int(notes[0].split(b" ")[1].replace(b",", b""))
    assert notes[0].endswith(b" lines not shown; they are in the log files")
    shown = [line for line in lines if line.startswith(b"[0] 0")]
    assert len(shown) + skipped == total
    assert shown == [b"[0] %060d" % number for number in range(len(shown))]
    assert lines[-1] == b"[0] last"


def test_skipped_lines_are_reported_without_further_output(screen):
    one = screen(world_size=1)
    one.terminal.stop()
    for number in range(40_000):
        one.console.output(0, 1, b"%060d\n" % number, 0.0)
    one.terminal.go_on()
    one.terminal.wait_for(b"lines not shown; they are in the log files\n")


def test_a_big_block_to_an_idle_terminal_is_shown_as_far_as_there_is_room(screen):
    one = screen(world_size=1)
    one.console.output(0, 1, b"0123456789\n" * 200_000, 0.0)
    one.terminal.wait_for(b"not shown")
    assert one.read().count(b"0123456789\n") > 10_000


def test_the_note_about_skipped_lines_has_a_line_of_its_own(screen):
    terminal = screen(world_size=1).terminal
    writer = TerminalWriter(
        terminal.fd, skipped=lambda lines: b"%d skipped\n" % lines, colour=False, high_water=100
    )
    terminal.stop()
    assert writer.put(b"x" * 90)
    assert not writer.put(b"y" * 20 + b"\n")
    terminal.go_on()
    assert terminal.wait_for(b"skipped\n") == b"x" * 90 + b"\n1 skipped\n"
    writer.begin_close()
    assert writer.finish_close(None) == 0


def test_closing_does_not_wait_for_a_stopped_terminal_beyond_its_time(screen):
    one = screen(world_size=1)
    one.terminal.stop()
    for _ in range(1000):
        one.console.output(0, 1, b"z" * 99 + b"\n", 0.0)
    assert one.console.close(timeout_s=0.05) > 0
    assert one.console.close(timeout_s=None) > 0
