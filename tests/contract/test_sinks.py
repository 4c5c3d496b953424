from __future__ import annotations

import json
import os
import threading

import pytest

from distlaunch.console.console import open_console
from distlaunch.console.passthrough import Passthrough
from distlaunch.console.torchrun_style import open_torchrun_console
from distlaunch.console.writer import HIGH_WATER
from distlaunch.coordinator.runtime.sink import Sink, StatusView
from distlaunch.core.model.run_files import STDERR, STDOUT

VIEW = StatusView(
    phase="running",
    workers_up=1,
    workers_total=1,
    attempt=0,
    restarts=0,
    max_restarts=0,
    started_s=0.0,
    log_dir="/tmp/x",
)


def plain(*, quiet: bool) -> Sink:
    return open_console(world_size=2, environ={}, format="plain", quiet=quiet)


def jsonl(*, quiet: bool) -> Sink:
    return open_console(world_size=2, environ={}, format="jsonl", quiet=quiet)


def rich_in_a_pipe(*, quiet: bool) -> Sink:
    return open_console(world_size=2, environ={}, format="rich", quiet=quiet)


def torchrun_raw(*, quiet: bool) -> Sink:
    return open_torchrun_console(modes={}, prefixes={}, environ={}, quiet=quiet)


def torchrun_tee(*, quiet: bool) -> Sink:
    modes = {(rank, stream): "tee" for rank in range(2) for stream in (STDOUT, STDERR)}
    prefixes = {rank: b"[default%d] " % rank for rank in range(2)}
    return open_torchrun_console(modes=modes, prefixes=prefixes, environ={}, quiet=quiet)


SINKS = {
    each.__name__: each for each in (plain, jsonl, rich_in_a_pipe, torchrun_raw, torchrun_tee)
} | {"passthrough": Passthrough}


class RedirectedOutput:
    """Descriptors 1 and 2 of this process, redirected into a pipe by ``open``."""

    def __init__(self, open_sink) -> None:
        self.kind = open_sink
        self._saved: list[int] = []
        self.reader = -1
        self._thread: threading.Thread | None = None
        self._read = bytearray()

    def open(self, *, quiet: bool = False) -> Sink:
        self._saved = [os.dup(fd) for fd in (1, 2)]
        self.reader, writer = os.pipe()
        for fd in (1, 2):
            os.dup2(writer, fd)
        os.close(writer)
        self._sink = self.kind(quiet=quiet)
        return self._sink

    def read(self) -> None:
        """Start reading the pipe."""
        self._thread = threading.Thread(target=self._read_on)
        self._thread.start()

    def _read_on(self) -> None:
        while chunk := os.read(self.reader, 1 << 16):
            self._read += chunk

    def break_off(self) -> None:
        os.close(self.reader)
        self.reader = -1

    def seen(self) -> bytes:
        """Close the sinks and return everything that was shown."""
        if self._thread is None:
            self.read()
        assert self._sink.close(timeout_s=None) == 0
        self.restore()
        return bytes(self._read)

    def restore(self) -> None:
        for fd, saved in zip((1, 2), self._saved, strict=bool(self._saved)):
            os.dup2(saved, fd)
            os.close(saved)
        self._saved = []
        if self._thread is not None:
            self._thread.join(20)
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1


@pytest.fixture(params=SINKS)
def redirected(request):
    made = RedirectedOutput(SINKS[request.param])
    yield made
    made.restore()


def texts(seen: bytes) -> list[str]:
    """Return the shown lines without prefixes; for jsonl, the texts of its records."""
    lines = []
    for line in seen.replace(b"\r", b"").decode().splitlines():
        record = json.loads(line) if line.startswith("{") else None
        lines.append(record.get("text", line) if record else line.rpartition("] ")[2])
    return lines


def test_every_line_of_both_streams_is_shown_once_and_in_its_ranks_order(redirected):
    sink = redirected.open()
    for number in range(50):
        sink.output(0, STDOUT, f"out {number}\n".encode(), float(number))
        sink.output(0, STDERR, f"err {number}\n".encode(), float(number))
        sink.tick(float(number))
    shown = texts(redirected.seen())
    assert [line for line in shown if line.startswith("out")] == [
        f"out {number}" for number in range(50)
    ]
    assert [line for line in shown if line.startswith("err")] == [
        f"err {number}" for number in range(50)
    ]


def test_a_line_may_come_in_pieces(redirected):
    sink = redirected.open()
    for piece in (b"one ", b"line", b"\nand ano", b"ther\n"):
        sink.output(0, STDOUT, piece, 0.0)
    assert [line for line in texts(redirected.seen()) if line] == ["one line", "and another"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_last_line_without_its_newline_is_shown(redirected, ended):
    sink = redirected.open()
    sink.output(0, STDOUT, b"no newline", 0.0)
    if ended:
        sink.rank_ended(0, 1.0)
    assert "no newline" in texts(redirected.seen())


def test_a_partial_line_is_shown_when_tick_is_due(redirected):
    sink = redirected.open()
    sink.output(0, STDOUT, b"password: ", 100.0)
    due = sink.tick(100.0)
    assert due is None or 100.0 < due <= 101.0
    if due is not None:
        assert sink.tick(due) is None
    assert any("password: " in line for line in texts(redirected.seen()))


def test_when_nothing_is_held_no_tick_is_due(redirected):
    sink = redirected.open()
    assert sink.tick(5.0) is None
    redirected.seen()


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_launcher_lines_are_shown(redirected, level):
    redirected.open().say("first line\nsecond line", level=level)
    seen = redirected.seen().decode()
    assert "first line" in seen
    assert "second line" in seen


def test_launcher_lines_do_not_break_a_workers_line(redirected):
    sink = redirected.open()
    sink.output(0, STDOUT, b"whole line\n", 0.0)
    sink.say("ours")
    sink.output(0, STDOUT, b"next line\n", 0.0)
    shown = texts(redirected.seen())
    assert {"whole line", "next line"} <= set(shown)
    assert sum("ours" in line for line in shown) == 1


def test_quiet_hides_information_and_nothing_else(redirected):
    sink = redirected.open(quiet=True)
    for level in ("info", "warning", "error"):
        sink.say(f"this is {level}", level=level)
    sink.output(0, STDOUT, b"from a worker\n", 0.0)
    seen = redirected.seen().decode()
    assert "this is info" not in seen
    assert all(words in seen for words in ("this is warning", "this is error", "from a worker"))


def test_names_in_launcher_lines_cannot_move_the_cursor(redirected):
    redirected.open().say("log: \x1b]0;t\x07l\udcff\r", level="error")
    seen = redirected.seen()
    assert b"\x1b" not in seen
    assert b"\x07" not in seen
    (line,) = texts(seen)
    assert (
        line.endswith(r"log: \x1b]0;t\x07l\xff\r")
        or json.loads(seen)["text"] == "log: \x1b]0;t\x07l\udcff\r"
    )


def test_text_that_is_not_unicode_is_shown(redirected):
    redirected.open().say("caf\udce9 \ud800")
    assert b"caf" in redirected.seen()


def test_bytes_that_are_not_utf8_are_shown(redirected):
    redirected.open().output(0, STDOUT, b"a\xff\x00b\n", 0.0)
    assert redirected.seen()


def test_events_and_status_never_disturb_the_workers_lines(redirected):
    sink = redirected.open()
    sink.event({"time": 1.0, "type": "attempt_started", "attempt": 0})
    sink.status(VIEW)
    sink.suspend()
    sink.resume()
    sink.output(0, STDOUT, b"line\n", 0.0)
    seen = redirected.seen()
    assert texts(seen)[-1] == "line"
    assert (b"attempt_started" in seen) == (redirected.kind is jsonl)


def test_closing_twice_is_closing_once(redirected):
    sink = redirected.open()
    sink.say("said once")
    redirected.read()
    assert [sink.close(timeout_s=None), sink.close(timeout_s=0.1)] == [0, 0]
    assert redirected.seen().count(b"said once") == 1


def fill(sink: Sink) -> int:
    """Write lines until there is no room; return how many."""
    line = b"x" * 999 + b"\n"
    block = line * 100
    for number in range(1, 20 * HIGH_WATER // len(block)):
        sink.output(0, STDOUT, block, float(number))
        sink.tick(float(number))
        if not sink.has_room():
            return number * 100
    pytest.fail("it takes for ever more")


def test_a_slow_pipe_leaves_no_room_and_loses_nothing(redirected):
    sink = redirected.open()
    room = threading.Event()
    sink.on_room(room.set)
    assert sink.has_room()
    lines = fill(sink)
    room.clear()
    redirected.read()
    assert room.wait(20), "nobody was woken"
    assert sink.has_room()
    assert redirected.seen().count(b"x" * 999) == lines


def test_a_pipe_that_nobody_reads_is_given_up_in_time_and_counted(redirected):
    sink = redirected.open()
    fill(sink)
    assert sink.close(timeout_s=0.05) > 0
    redirected.read()  # else the writer's thread stays in its last write


def test_a_closed_pipe_is_no_error_and_uses_no_memory(redirected):
    sink = redirected.open()
    redirected.break_off()
    for number in range(100):
        sink.output(0, STDOUT, b"x" * 100_000 + b"\n", float(number))
        sink.say("into the void", level="error")
    assert sink.close(timeout_s=5) > 0
    assert sink.has_room()
