from __future__ import annotations

import pyte
import pytest

from distlaunch.console.live_display import Display
from tests.unit.console.test_terminal import view

FRAME_S = 0.05


def drawn(shown: bytes, columns: int = 80) -> list[str]:
    """Return the rows that a terminal shows for these bytes, without empty ones at the end."""
    emulator = pyte.Screen(columns, 24)
    emulator.set_mode(pyte.modes.LNM)
    pyte.ByteStream(emulator).feed(shown)
    rows = [row.rstrip() for row in emulator.display]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def test_a_bar_is_redrawn_in_place_behind_its_prefix(screen):
    one = screen(world_size=2)
    one.console.output(0, 2, b"\r 0%", 0.0)
    one.console.tick(0.5)
    assert drawn(one.terminal.wait_for(b"0%")) == ["[0]  0%"]
    one.console.output(0, 2, b"\r 20%\r 30%", 0.7)
    assert drawn(one.terminal.wait_for(b"30%")) == ["[0]  30%"]
    one.console.output(0, 2, b"\r100%\n", 0.8)
    one.console.tick(2.0)
    assert drawn(one.read()) == ["[0] 100%"]


def test_a_bar_that_ends_with_its_carriage_return_is_redrawn_too(screen):
    one = screen(world_size=1)
    one.console.output(0, 1, b"10%\r", 0.0)
    one.console.tick(0.5)
    one.console.output(0, 1, b"20%\r", 0.6)
    assert drawn(one.terminal.wait_for(b"20%")) == ["[0] 20%"]
    one.console.output(0, 1, b"30%\r\n", 0.7)
    assert drawn(one.read()) == ["[0] 30%"]


def test_the_first_of_two_bars_stays_in_place_if_its_newline_comes_with_it(screen):
    two = screen(world_size=2)
    two.console.output(0, 2, b"a line\n\r row 0: 0\n", 1.0)
    two.console.output(0, 2, b"\r row 1: 0\x1b[A", 1.01)
    two.console.output(0, 2, b"\r row 0: 1\n\r row 1: 1\x1b[A", 1.02)
    for now in (2.0, 3.0):
        two.console.tick(now)
    rows = ["[0] a line", "[0]  row 0: 1", "[0]  row 1: 1"]
    assert drawn(two.terminal.wait_for(b"row 1: 1")) == rows
    two.read()


BARS = b"\r row 0\n\r row 1\x1b[A"
CLEARED = b"\r      \n\r      \x1b[A"


def test_a_line_that_comes_in_the_middle_of_a_redraw_on_the_other_stream_goes_above_the_bars(
    screen,
):
    """``tqdm.write`` clears two bars on stderr, writes to stdout, and draws the bars again."""
    two = screen(world_size=2)
    two.console.output(0, 2, BARS + b"\r" + CLEARED + b"\r row 0\n", 1.0)
    two.console.output(0, 1, b"half way\n", 1.0)
    two.console.output(0, 2, b"\r row 1\x1b[A", 1.01)
    for now in (2.0, 3.0):
        two.console.tick(now)
    assert drawn(two.terminal.wait_for(b"half way")) == ["[0] half way", "[0]  row 0", "[0]  row 1"]
    two.read()


def test_a_message_of_the_launcher_comes_after_a_line_that_is_held(screen):
    two = screen(world_size=2)
    two.console.output(0, 2, BARS + b"\n\n", 1.0)
    two.console.output(0, 1, b"trained\n", 1.0)
    two.console.say("the end")
    two.console.tick(2.0)
    assert drawn(two.read())[-2:] == ["[0] trained", "distlaunch: the end"]


def test_a_line_after_bars_have_ended_comes_below_them(screen):
    two = screen(world_size=2)
    two.console.output(0, 2, BARS + b"\n\n", 1.0)
    two.console.output(0, 1, b"trai", 1.0)
    two.console.output(0, 1, b"ned\n", 1.01)
    two.console.tick(1.06)
    two.console.tick(2.0)
    assert drawn(two.read()) == ["[0]  row 0", "[0]  row 1", "[0] trained"]


def test_lines_of_other_ranks_go_above_a_bar(screen):
    two = screen(world_size=2)
    two.console.output(0, 2, b"\r 0%\r 1%", 0.0)
    two.terminal.wait_for(b"1%")
    two.console.output(1, 1, b"hello\n", 0.6)
    two.console.tick(0.7)
    two.terminal.wait_for(b"hello")
    two.console.output(0, 2, b"\r60%", 0.9)
    assert drawn(two.terminal.wait_for(b"60%")) == ["[1] hello", "[0] 60%"]
    two.read()


def test_rank_0_draws_in_place_and_bars_of_others_are_lines_every_ten_seconds_and_at_their_end(
    screen,
):
    four = screen(world_size=4)
    for tenth in range(301):
        now = tenth / 10
        for rank in (1, 2, 3, 0):
            four.console.output(rank, 2, b"\r%d:\r%d: %d" % (rank, rank, tenth), now)
        due = four.console.tick(now)
        assert due is None or due > now
    for rank in range(4):
        four.console.output(rank, 2, b"\r%d: end\n" % rank, 30.1)
    four.console.tick(31.0)
    lines = drawn(four.read())
    assert [line for line in lines if line.startswith("[0]")] == ["[0] 0: end"]
    for rank in (2, 3):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [
            f"[{rank}] {rank}: {state}" for state in (5, 105, 205, "end")
        ]
    assert "[1] 1: end" in lines


def test_rank_0_takes_the_live_rows_from_another_rank(screen):
    two = screen(world_size=2)
    two.console.output(1, 2, b"\r 4%\r 5%", 0.0)
    two.terminal.wait_for(b"[1]  5%")
    two.console.output(0, 2, b"\r10%\r11%", 0.1)
    assert drawn(two.terminal.wait_for(b"11%")) == ["[0] 11%"]
    two.console.output(1, 2, b"\r 6%", 0.2)
    for now in (0.9, 1.01):
        two.console.tick(now)
    two.terminal.wait_for(b" 6%")
    two.console.output(0, 2, b"\r12%", 1.1)
    assert drawn(two.terminal.wait_for(b"12%")) == ["[1]  6%", "[0] 12%"]
    two.read()


def test_another_rank_has_the_live_rows_when_their_bar_has_stood_still_for_ten_seconds(screen):
    three = screen(world_size=3)
    three.console.output(1, 2, b"\rone\rone", 0.0)
    three.terminal.wait_for(b"one")
    three.console.output(2, 2, b"\rtwo\rtwo", 10.1)
    assert drawn(three.terminal.wait_for(b"two")) == ["[2] two"]
    three.console.output(2, 2, b"\rdone\n", 10.2)
    three.console.rank_ended(1, 10.3)
    assert sorted(drawn(three.read())) == ["[1] one", "[2] done"]


def test_both_streams_of_one_rank_have_live_rows(screen):
    one = screen(world_size=1)
    for stream in (1, 2):
        one.console.output(0, stream, b"\r0\r1 of %d" % stream, stream / 10)
    assert drawn(one.terminal.wait_for(b"1 of 2")) == ["[0] 1 of 1", "[0] 1 of 2"]
    one.read()


def test_the_status_line_stays_below_the_bars(screen):
    one = screen(world_size=2)
    one.console.status(view())
    one.console.output(0, 2, b"\r 0%\r 1%", 0.0)
    one.terminal.wait_for(b"1%")
    one.console.output(1, 2, b"a line\n", 0.1)
    one.console.tick(0.3)
    one.terminal.wait_for(b"a line")
    one.console.say("ours")
    one.terminal.wait_for(b"ours")
    one.console.output(0, 2, b"\r 2%", 0.5)
    one.terminal.wait_for(b"2%")
    one.console.status(view(phase="stopping"))
    rows = drawn(one.terminal.wait_for(b"stopping \xc2\xb7 4/4"))
    assert rows[:3] == ["[1] a line", "distlaunch: ours", "[0]  2%"]
    assert rows[3].startswith("distlaunch: stopping")
    one.read()


def test_no_more_live_rows_than_leave_room_for_lines(screen):
    one = screen(world_size=1)
    one.console.output(0, 1, b"\x1b[?25l" + b"row\n" * 50, 0.0)
    one.console.tick(FRAME_S)
    one.terminal.wait_for(b"row")
    one.console.say("above")
    one.terminal.wait_for(b"above")
    one.console.output(0, 1, b"last row\n", 1.0)
    rows = drawn(one.terminal.wait_for(b"last row"))
    assert rows[:2] == ["distlaunch: above", "[0] row"]
    assert len(rows) <= 19
    one.read()


def test_suspending_clears_the_bars_too(screen):
    one = screen(world_size=1)
    one.console.output(0, 2, b"\r 0%\r 1%", 0.0)
    one.terminal.wait_for(b"1%")
    one.console.suspend()
    assert drawn(one.terminal.wait_for(b"\x1b[K")) == []
    one.console.resume()
    assert drawn(one.terminal.wait_for(b"\x1b[K[0]  1%")) == ["[0]  1%"]
    one.read()


def test_a_prompt_after_a_bar_that_stands_still_keeps_the_cursor(screen):
    one = screen(world_size=1)
    one.console.output(0, 2, b"\r 0%\r 1%", 0.0)
    one.terminal.wait_for(b"1%")
    one.console.output(0, 1, b"(Pdb) ", 1.0)
    one.console.tick(1.5)
    assert one.terminal.wait_for(b"(Pdb) ").endswith(b"[0]  1%\n[0] (Pdb) ")
    one.read()


def test_output_on_the_other_stream_is_shown_below_a_bar(screen):
    one = screen(world_size=1)
    one.console.output(0, 2, b"\r50%", 0.0)
    one.console.tick(0.5)
    one.console.output(0, 2, b"\r100%\n", 0.6)
    one.console.output(0, 1, b"done\n", 0.6)
    assert drawn(one.read()) == ["[0] 100%", "[0] done"]


def test_escapes_in_the_state_of_another_ranks_bar_do_not_get_through(screen):
    two = screen(world_size=2)
    two.console.output(0, 2, b"\r1\r2", 0.0)
    for rank in (0, 1):
        two.console.output(rank, 2, b"\r1\x1b]0;owned\x07", 0.0)
        two.console.output(rank, 2, b"\r2\x1b[2J\x1b[", 0.1)
    two.console.tick(0.6)
    two.console.tick(0.7)
    shown = two.read()
    assert b"2" in shown
    assert b"\x1b" not in shown.replace(b"\x1b[K", b"")
    assert b"\x07" not in shown


def test_a_finished_bar_shows_its_last_state_only(screen):
    two = screen(world_size=2)
    for rank in (0, 1):
        two.console.output(rank, 2, b"\r 0%\r50%\r100%\n", 0.0)
    assert drawn(two.read()) == ["[0] 100%", "[1] 100%"]


@pytest.mark.parametrize("stdout", ["pipe", "jsonl"])
def test_nested_bars_are_a_few_lines_where_they_cannot_be_drawn(memory, stdout):
    kept = memory(world_size=2, **({"format": "jsonl"} if stdout == "jsonl" else {}))
    for step in range(1000):
        kept.console.output(0, 2, b"\repoch 1\n\rstep %d\x1b[A" % step, step / 100)
        kept.console.tick(step / 100)
    kept.console.output(0, 2, b"\repoch 2\n", 10.0)
    kept.console.tick(11.0)
    text = b"".join(kept.read())
    assert text.count(b"\n") <= 5
    assert b"epoch 2" in text


# --- what a program draws


def test_nested_bars_stay_until_the_program_leaves_them():
    display = Display()
    assert display.feed(b"\router 0", 0.0) == []
    for step in range(10):
        assert display.feed(b"\n\rinner %d\x1b[A" % step, step) == []
        assert display.rows() == [b"outer 0", b"inner %d" % step]
    assert display.feed(b"\n\r       \x1b[A\router 1\n", 11.0) == []
    assert display.due() is None, "the next inner bar may follow"
    assert display.feed(b"line 0\n", 12.0) == [b"outer 1"]
    for line in range(1, 11):
        assert display.feed(b"line %d\n" % line, 12.0 + line) == [b"line %d" % (line - 1)]
    assert display.due() == pytest.approx(23.0)
    assert display.settle(23.1) == [b"line 10"]
    assert display.is_over


def test_a_bar_becomes_a_line_once_something_follows_it():
    display = Display()
    display.feed(b"\r50%\r100%\n", 0.0)
    assert (display.due(), display.settle(60.0)) == (None, [])
    assert display.feed(b"a line\n", 61.0) == [b"100%"]
    assert display.settle(62.1) == [b"a line"]
    assert display.is_over


def test_a_display_with_hidden_cursor_is_final_above_its_top():
    display = Display()
    table = b"\r\x1b[2K\x1b[1A\x1b[2K"
    display.feed(b"\x1b[?25lone\ntwo", 0.0)
    assert display.feed(table + b"a line\none\ntwo\nthree", 1.0) == []
    assert display.feed(table + b"\x1b[1A\x1b[2Kone\ntwo\nfour", 2.0) == [b"a line"]
    assert display.rows() == [b"one", b"two", b"four"]
    assert display.settle(60.0) == []
    assert display.feed(b"\n\x1b[?25h", 61.0) == [b"one", b"two"]
    assert display.settle(62.1) == [b"four"]
    assert display.is_over


def test_a_display_that_rests_below_its_rows_keeps_them():
    display = Display()
    display.feed(b"a 0\nb 0\n", 0.0)
    for step in range(1, 20):
        assert display.feed(b"\x1b[2A\ra %d\n\rb %d\n" % (step, step), step / 2) == []
        assert display.rows() == [b"a %d" % step, b"b %d" % step]


def test_sequences_split_at_any_place_draw_the_same():
    data = "\r10%\n\r\x1b[1;31mé█\x1b[0m\x1b[38;2;255;255;255;48;2;100;100;100mx\x1b[0m漢\x1b[A\x1b[5Gz\x1b[K".encode()
    whole = Display()
    whole.feed(data, 0.0)
    for cut in range(len(data) + 1):
        display = Display()
        display.feed(data[:cut], 0.0)
        display.feed(data[cut:], 0.0)
        assert (
            display.rows()
            == whole.rows()
            == [
                b"10% z",
                "\x1b[1;31mé█\x1b[0m\x1b[38;2;255;255;255;48;2;100;100;100mx\x1b[0m漢".encode(),
            ]
        )


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x1b[2J\x1b[H",
        b"\x1b]0;title\x07",
        b"\x1b[?1049h",
        b"\x1b[9999A\x1b[9999B",
        b"\x1b[6n",
        b"\x1bc",
        b"\x1b[1;1r",
        b"\x9b2J",
        b"\x1b[99999999999C",
        b"\x1bPq",
    ],
)
def test_a_display_contains_only_text_and_colours(hostile):
    display = Display()
    display.feed(b"one\n\x1b[A" + hostile * 50 + b"end", 0.0)
    rows = display.rows()
    assert len(rows) <= 100
    assert not any(code in b"".join(rows) for code in (b"\x1b", b"\x07", b"\r", b"\n"))
    "".join(row.decode() for row in rows)


def test_a_row_is_cut_at_the_width_of_the_screen_and_kept_whole_as_a_line():
    display = Display()
    display.feed("\r漢字漢字 and more".encode(), 0.0)
    assert display.rows(5) == ["漢字".encode()]
    assert display.finish() == ["漢字漢字 and more".encode()]


def test_a_bar_with_a_hundred_thousand_states_takes_little_time():
    display = Display()
    for chunk in range(10):
        display.feed(
            b"".join(b"\r%d" % state for state in range(chunk * 10_000, (chunk + 1) * 10_000)), 0.0
        )
    assert display.rows() == [b"99999"]


def drawn_by(piece, count, now=0.0):
    """Return the final lines and the current rows after a program has written these bytes."""
    display = Display()
    final = 0
    data = piece * (65_536 // len(piece))
    for _ in range(count):
        final += sum(map(len, display.feed(data, now)))
    return final, sum(map(len, display.rows())), display


@pytest.mark.parametrize(
    "piece",
    [
        b"\t",
        b"\x1b[9999C",
        b"\x1b[9999C\x1b[9999C\x1b[9999C\x1b[9999C\x1b[9999C\x1b[9999C\x1b[9999Cx\n",
        b"\x1b[9999C\x1b[9999C\x1b[9999C\x1b[9999Cx\x1b[1B",
        b"\x1b[9999Gx\x1b[1B\x1b[99A",
        b"x" * 65_000 + b"\x1b[1B",
        b"\x1b[99A\x1b[99B" + b"x" * 65_000 + b"\x1b[1A",
        b"\x1b]0;" + b"t" * 60_000,
        b"\x1b[" + b"1;" * 30_000,
        b"\x1b[1m\x1b[2m" * 20 + b"x",
        b"\xcc\x81",
    ],
)
def test_no_program_makes_its_rows_grow_without_limit(piece):
    final, shown, display = drawn_by(piece, 12)
    shown += sum(map(len, display.feed(b"x", 0.0)))
    assert shown <= 1 << 20
    assert final <= 12 * 65_536 * 30
    assert len(display.rows()) <= 100


def test_tabs_move_the_cursor_no_further_than_a_line_may_be_long():
    _, _, display = drawn_by(b"\t", 4)
    display.feed(b"x", 0.0)
    assert display.rows() == []
    display.feed(b"\r\t\tx", 0.0)
    assert display.rows() == [b" " * 16 + b"x"]


def test_a_row_with_more_colours_than_text_is_shown_without_them():
    display = Display()
    for _ in range(30):
        display.feed(b"".join(b"\x1b[38;5;%dmx" % (at % 200 + 1) for at in range(1000)), 0.0)
    assert display.rows() == [b"x" * 30_000]


@pytest.mark.parametrize("columns", [-3, -1, 0, 1])
def test_a_terminal_that_is_narrower_than_a_prefix_shows_no_more_than_fits(columns):
    display = Display()
    for step in range(3):
        display.feed(b"\x1b[A\x1b[2K\r%3d%%|###" % step, step)
        display.feed(b"\n\n\x1b[A", step)
        assert all(len(row) <= max(0, columns) for row in display.rows(columns))
