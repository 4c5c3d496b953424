from __future__ import annotations

import pytest

BAR = b"\r\x1b[K[0] "


def test_a_bar_is_redrawn_in_place_behind_its_prefix(screen):
    one = screen(world_size=2)
    one.console.output(0, 2, b"\r 0%", 0.0)
    one.console.tick(0.5)
    one.console.output(0, 2, b"\r 10%", 0.6)
    one.console.output(0, 2, b"\r 20%\r 30%", 0.7)
    one.console.output(0, 2, b"\r100%\n", 0.8)
    assert one.read() == b"[0]  0%" + BAR + b" 10%" + BAR + b" 30%" + BAR + b"100%\n"


def test_a_bar_that_ends_with_its_carriage_return_is_redrawn_too(screen):
    one = screen(world_size=1)
    one.console.output(0, 1, b"10%\r", 0.0)
    one.console.tick(0.5)
    one.console.output(0, 1, b"20%\r", 0.6)
    one.console.output(0, 1, b"30%\r\n", 0.7)
    assert one.read() == b"[0] 10%" + BAR + b"20%" + BAR + b"30%\n"


def test_another_rank_ends_the_bars_line_first(screen):
    two = screen(world_size=2)
    two.console.output(0, 2, b"\r 0%", 0.0)
    two.console.tick(0.5)
    two.console.output(1, 1, b"hello\n", 0.6)
    two.console.tick(0.7)
    two.console.output(0, 2, b"\r50%", 0.8)
    assert two.console.tick(0.8) == pytest.approx(1.3)
    two.console.output(0, 2, b"\r60%", 0.9)
    two.console.tick(1.3)
    assert two.read() == b"[0]  0%\n[1] hello\n[0] 60%\n"


def test_bars_of_many_ranks_are_lines_every_ten_seconds_and_at_their_end(screen):
    four = screen(world_size=4)
    for tenth in range(301):
        now = tenth / 10
        for rank in range(4):
            four.console.output(rank, 2, b"\r%d: %d" % (rank, tenth), now)
        due = four.console.tick(now)
        assert due is None or due > now
    for rank in range(4):
        four.console.output(rank, 2, b"\r%d: end\n" % rank, 30.1)
    four.console.tick(31.0)
    shown = four.read()
    assert b"\r" not in shown
    for rank in range(4):
        label = b"[%d] %d: " % (rank, rank)
        states = [line.removeprefix(label) for line in shown.split(b"\n") if line.startswith(label)]
        assert states == [b"5", b"105", b"205", b"end"]
    assert shown.count(b"\n") == 16


def test_a_bar_in_place_leaves_the_cursor_when_another_starts(screen):
    two = screen(world_size=2)
    two.console.output(0, 2, b"\r 0%", 0.0)
    two.console.tick(0.5)
    two.console.output(1, 2, b"\r 5%", 1.0)
    two.console.output(0, 2, b"\r10%", 1.1)
    assert two.console.tick(1.1) == 1.5
    two.console.tick(1.7)
    assert two.console.tick(10.4) == 10.5
    two.console.tick(10.5)
    two.console.tick(10.7)
    assert two.read() == b"[0]  0%\n[1]  5%\n[0] 10%\n"


def two_bars(two) -> None:
    for now in (0.0, 0.5, 1.0):
        for rank in (0, 1):
            two.console.output(rank, 2, b"\r%d" % (now * 10), now)
        two.console.tick(now)


def test_a_bar_is_in_place_again_when_the_others_have_stood_still_for_ten_seconds(screen):
    two = screen(world_size=2)
    two_bars(two)
    two.console.tick(10.5)
    two.console.tick(10.7)
    two.console.output(0, 2, b"\ralone", 11.0)
    two.console.tick(11.5)
    two.console.output(0, 2, b"\rstill", 11.6)
    two.console.output(0, 2, b"\rdone\n", 11.7)
    assert two.read().endswith(b"[0] alone" + BAR + b"still" + BAR + b"done\n")


def test_a_bar_is_in_place_again_when_the_rank_of_the_other_has_ended(screen):
    two = screen(world_size=2)
    two_bars(two)
    two.console.rank_ended(1, 2.0)
    two.console.output(0, 2, b"\ralone", 2.1)
    two.console.tick(2.6)
    two.console.output(0, 2, b"\rstill", 2.7)
    assert two.read().endswith(b"[0] alone" + BAR + b"still\n")


def test_two_streams_of_one_rank_compete_too(screen):
    one = screen(world_size=1)
    for tenth in range(50):
        for stream in (1, 2):
            one.console.output(0, stream, b"\r%d of %d" % (tenth, stream), tenth / 10)
        one.console.tick(tenth / 10)
    shown = one.read()
    assert b"\r" not in shown
    assert sorted(shown.split(b"\n")) == [b"", b"[0] 49 of 1", b"[0] 49 of 2", b"[0] 5 of 1", b"[0] 5 of 2"]


def test_escapes_in_the_state_of_a_competing_bar_do_not_get_through(screen):
    two = screen(world_size=2)
    for rank in (0, 1):
        two.console.output(rank, 2, b"\r1\x1b]0;owned\x07", 0.0)
        two.console.output(rank, 2, b"\r2\x1b[2J\x1b[", 0.1)
    two.console.tick(0.6)
    two.console.tick(0.7)
    shown = two.read()
    assert b"2" in shown
    assert b"\x1b" not in shown
    assert b"\x07" not in shown


def test_a_finished_bar_shows_its_last_state_only_and_folds(screen):
    two = screen(world_size=2)
    for rank in (0, 1):
        two.console.output(rank, 2, b"\r 0%\r50%\r100%\n", 0.0)
    assert two.read() == b"[0-1] 100%\n"
