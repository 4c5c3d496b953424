from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.console.torchrun_style import HOLD_S, open_torchrun_console

OUT, ERR = 1, 2
TEE = {(rank, stream): "tee" for rank in range(4) for stream in (OUT, ERR)}
RAW = {(rank, stream): "raw" for rank in range(4) for stream in (OUT, ERR)}
PREFIXES = {rank: b"[default%d]:" % rank for rank in range(4)}


class Shown:
    """A console whose stdout and stderr are memory files; with ``same`` one file."""

    def __init__(self, modes, *, same=False, quiet=True) -> None:
        self._out = os.memfd_create("out")
        self._err = self._out if same else os.memfd_create("err")
        self.console = open_torchrun_console(
            modes=modes,
            prefixes=PREFIXES,
            environ={},
            quiet=quiet,
            stdout_fd=self._out,
            stderr_fd=self._err,
            clock=lambda: 0.0,
        )

    def read(self) -> tuple[bytes, bytes]:
        assert self.console.close(timeout_s=None) == 0
        found = tuple(os.pread(fd, 1 << 30, 0) for fd in (self._out, self._err))
        for fd in {self._out, self._err}:
            os.close(fd)
        return found


def test_raw_bytes_pass_as_they_are():
    some = Shown(RAW)
    for chunk in (b"one\n", b"\r10%", b"\r20%", b"\xff\x00\x1b[A", b"\n", b"no end"):
        some.console.output(0, OUT, chunk, 0.0)
        some.console.output(0, ERR, b"e" + chunk, 0.0)
    some.console.rank_ended(0, 1.0)
    out, err = some.read()
    assert out == b"one\n\r10%\r20%\xff\x00\x1b[A\nno end"
    assert err == b"eone\ne\r10%e\r20%e\xff\x00\x1b[Ae\neno end"


def test_the_only_raw_rank_is_shown_at_once():
    modes = {(0, OUT): "raw", (0, ERR): "raw", (1, OUT): "hidden", (1, ERR): "hidden"}
    some = Shown(modes)
    some.console.output(0, OUT, b"name? ", 5.0)
    assert some.console.tick(5.0) is None
    assert some.read()[0] == b"name? "


def test_an_unfinished_raw_line_of_several_ranks_waits_a_moment_for_its_end():
    some = Shown(RAW)
    some.console.output(0, OUT, b"line", 5.0)
    some.console.output(1, OUT, b"other\n", 5.0)
    some.console.output(0, OUT, b"\n", 5.01)
    some.console.output(2, OUT, b"prompt: ", 5.02)
    assert some.console.tick(5.03) == pytest.approx(5.02 + HOLD_S)
    assert some.console.tick(5.02 + HOLD_S) is None
    assert some.read()[0] == b"other\nline\nprompt: "


def test_a_raw_ranks_own_order_holds_across_its_streams():
    some = Shown(RAW, same=True)
    some.console.output(0, OUT, b"progress...", 5.0)
    some.console.output(0, ERR, b"warning\n", 5.0)
    some.console.output(0, OUT, b"done\n", 5.0)
    assert some.read()[0] == b"progress...warning\ndone\n"


def test_the_same_line_of_all_ranks_is_not_folded():
    for modes, line in ((RAW, b"same\n"), (TEE, b"]:same\n")):
        some = Shown(modes)
        for rank in range(4):
            some.console.output(rank, OUT, b"same\n", 0.0)
        assert some.read()[0].count(line) == 4


def test_teed_lines_have_the_templates_prefix():
    some = Shown(TEE)
    some.console.output(0, OUT, b"one\ntwo\n", 0.0)
    some.console.output(1, ERR, b"three\n", 0.0)
    assert some.read() == (b"[default0]:one\n[default0]:two\n", b"[default1]:three\n")


def test_a_teed_line_is_not_torn_by_another_rank():
    some = Shown(TEE)
    some.console.output(0, OUT, b"part", 0.0)
    some.console.output(1, OUT, b"part", 0.0)
    some.console.output(0, OUT, b"ial done\nno newline", 0.0)
    some.console.output(1, OUT, b"ial done\nat end", 0.0)
    for rank in range(2):
        some.console.rank_ended(rank, 1.0)
    assert some.read()[0] == (
        b"[default0]:partial done\n[default1]:partial done\n[default0]:no newline\n[default1]:at end\n"
    )


def test_a_teed_bar_is_its_last_state_and_windows_line_ends_are_none():
    some = Shown(TEE)
    some.console.output(0, ERR, b"\r10%\r50%", 0.0)
    some.console.output(0, ERR, b"\r100%\nnext\r\n", 0.1)
    assert some.read()[1] == b"[default0]:100%\n[default0]:next\r\n"


def test_hidden_streams_are_not_shown():
    some = Shown({(0, OUT): "hidden", (0, ERR): "tee", (1, OUT): "raw", (1, ERR): "hidden"})
    for rank in range(2):
        for stream in (OUT, ERR):
            some.console.output(rank, stream, b"%d %d\n" % (rank, stream), 0.0)
    assert some.read() == (b"1 1\n", b"[default0]:0 2\n")


def test_a_teed_line_begins_at_the_left_after_an_unfinished_raw_one():
    some = Shown({(0, OUT): "raw", (1, OUT): "tee"})
    some.console.output(0, OUT, b"raw", 0.0)
    some.console.output(1, OUT, b"teed\n", 0.0)
    some.console.output(0, OUT, b" on\n", 0.0)
    assert some.read()[0] == b"raw\n[default1]:teed\n on\n"


def test_raw_bytes_after_an_unfinished_teed_line_begin_at_the_left():
    some = Shown({(0, OUT): "raw", (1, OUT): "tee"})
    some.console.output(1, OUT, b"teed", 0.0)
    some.console.tick(10.0)
    some.console.output(0, OUT, b"raw\n", 10.0)
    some.console.output(1, OUT, b" on\n", 10.0)
    assert some.read()[0] == b"[default1]:teed\nraw\n[default1]: on\n"


def test_our_own_lines_begin_at_the_left_and_end_the_raw_line():
    some = Shown(RAW, same=True)
    some.console.output(0, OUT, b"\r30%", 0.0)
    some.console.tick(1.0)
    some.console.say("rank 1 failed", level="error")
    some.console.say("not shown")
    some.console.output(0, OUT, b"\r40%\n", 2.0)
    assert some.read()[0] == b"\r30%\ndistlaunch: rank 1 failed\n\r40%\n"


def test_our_own_lines_go_to_stderr_only():
    some = Shown(RAW)
    some.console.output(0, OUT, b"half", 0.0)
    some.console.say("rank 1 failed", level="error")
    assert some.read() == (b"half", b"distlaunch: rank 1 failed\n")


def test_a_long_raw_line_without_end_is_not_kept():
    some = Shown(RAW)
    for number in range(100):
        some.console.output(0, OUT, b"x" * 10_000, 0.001 * number)
    out, _ = some.read()
    assert out == b"x" * 1_000_000


def test_a_rank_of_which_nothing_is_reported_is_raw_and_has_no_prefix():
    some = Shown({})
    some.console.output(9, OUT, b"x\n", 0.0)
    assert some.read()[0] == b"x\n"


def on_terminal(fd: int):
    return open_torchrun_console(
        modes={(0, OUT): "raw", (1, OUT): "tee"},
        prefixes=PREFIXES,
        environ={"NO_COLOR": "1"},
        quiet=True,
        stdout_fd=fd,
        stderr_fd=fd,
    )


def test_a_terminal_gets_raw_bytes_unchanged_and_teed_ones_harmless(terminal):
    console = on_terminal(terminal.fd)
    console.output(0, OUT, b"\x1b[2Jraw\n", 0.0)
    console.output(1, OUT, b"\x1b[2Jteed\n", 0.0)
    assert console.close(timeout_s=None) == 0
    seen = terminal.wait_for(b"teed\n")
    assert b"\x1b[2Jraw\n" in seen
    assert b"\x1b[2J" not in seen.partition(b"[default1]:")[2]


def test_a_stopped_terminal_skips_raw_lines_and_shows_how_many(terminal):
    console = on_terminal(terminal.fd)
    terminal.stop()
    for _ in range(4000):
        console.output(0, OUT, b"x" * 999 + b"\n", 0.0)
    assert console.has_room()
    terminal.go_on()
    assert terminal.wait_for(b" not shown; they are in the log files")
    assert console.close(timeout_s=None) == 0


class Long(bytes):
    """Bytes with a short repr, because hypothesis warns about long ones."""

    def __repr__(self) -> str:
        return f"Long({len(self)})"


CHUNKS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([OUT, ERR]),
        st.sampled_from(
            [b"a", b"\n", b"line\n", b"\r5%", b"x\ny", b"\xff\x00", Long(b"q" * 70_000)]
        ),
        st.sampled_from([0.0, 0.01, 0.2]),
    ),
    max_size=30,
)


@given(CHUNKS)
def test_of_several_raw_ranks_every_byte_is_shown_on_its_descriptor(chunks):
    some = Shown(RAW)
    now = 0.0
    written = {OUT: b"", ERR: b""}
    for rank, stream, data, wait in chunks:
        now += wait
        some.console.output(rank, stream, data, now)
        some.console.tick(now)
        written[stream] += data
    for stream, shown in zip((OUT, ERR), some.read(), strict=True):
        assert sorted(shown) == sorted(written[stream])


@given(CHUNKS)
def test_one_ranks_raw_bytes_are_exactly_what_it_wrote(chunks):
    some = Shown(RAW)
    now = 0.0
    written = {OUT: b"", ERR: b""}
    for _, stream, data, wait in chunks:
        now += wait
        some.console.output(0, stream, data, now)
        some.console.tick(now)
        written[stream] += data
    assert dict(zip((OUT, ERR), some.read(), strict=True)) == written


@given(CHUNKS)
def test_every_teed_line_begins_with_a_prefix(chunks):
    some = Shown(TEE, same=True)
    now = 0.0
    for rank, stream, data, wait in chunks:
        now += wait
        some.console.output(rank, stream, data, now)
        some.console.tick(now)
    shown = some.read()[0]
    assert not shown or shown.endswith(b"\n")
    assert all(line.startswith(b"[default") for line in shown.split(b"\n")[:-1])
