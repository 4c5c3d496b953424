from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.console import repeated_blocks
from distlaunch.console.console import open_console
from distlaunch.core.model.text import format_ranks
from tests.examples import examples


def lines_of(shown: bytes, ranks: int) -> list[list[bytes]]:
    """Return every rank's lines in the order shown, without prefixes."""
    members = {format_ranks([rank]): [rank] for rank in range(ranks)}
    for mask in range(1 << ranks):
        group = [rank for rank in range(ranks) if mask >> rank & 1]
        members[format_ranks(group)] = group
    found: list[list[bytes]] = [[] for _ in range(ranks)]
    assert not shown or shown.endswith(b"\n")
    for line in shown.split(b"\n")[:-1]:
        label, _, text = line.partition(b"] ")
        for rank in members[label[1:].decode()]:
            found[rank].append(text)
    return found


def in_a_file(written: bytes) -> list[bytes]:
    """Return the lines of a file, with only the last state of redrawn lines."""
    lines = written.split(b"\n")
    last = lines.pop()
    if not is_blank(last) or (last and b"\r" not in last):
        lines.append(last)
    return [
        ([b""] + [state for state in line.split(b"\r") if not is_blank(state)])[-1]
        if b"\r" in line[:-1]
        else line
        for line in lines
    ]


def is_blank(state: bytes) -> bool:
    """Return whether text shows nothing: blanks, and sequences that erase or move up."""
    for sequence in (b"\x1b[K", b"\x1b[0K", b"\x1b[2K", b"\x1b[A"):
        state = state.replace(sequence, b"")
    return not state.strip()


CONTENT = st.one_of(
    st.sampled_from(
        [
            b"\n",
            b"same\n",
            b"same\nnext\n",
            b"pa",
            b"\r\n",
            b"\r",
            b"\r10%",
            b"20%\r",
            b"\r  \r",
            b"loss 1\n" * 40,
            b"x" * 200 + b"\n",
        ]
    ),
    st.binary(max_size=12),
    st.integers(1, 90).map(lambda count: b"%d\n" % count * count * 9),
)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), CONTENT, st.floats(0, 0.2)), max_size=40))
def test_unprefixed_output_is_what_each_rank_wrote_but_for_lines_drawn_over(memory, chunks):
    patched = pytest.MonkeyPatch()
    patched.setattr(
        repeated_blocks, "_MIN_LINES", 10**9
    )  # no block becomes a line that only counts it
    written = [b""] * 3
    some = memory(world_size=3)
    now = 0.0
    for rank, data, wait in chunks:
        now = min(now + wait, 0.49)  # no partial line becomes due
        text = data.replace(b"\x1b", b"")  # sequences that move the cursor are followed, not kept
        some.console.output(rank, 1, text, now)
        some.console.tick(now)
        written[rank] += text
    found = lines_of(some.stdout(), 3)
    patched.undo()
    assert found == [in_a_file(text) for text in written]


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from([b"a", b"bc", b"\n", b"d\n", b"e\nf"]),
            st.floats(0, 1),
        ),
        max_size=30,
    )
)
def test_partial_lines_lose_nothing_whoever_interrupts_them(memory, chunks):
    some = memory(world_size=3)
    written = [b""] * 3
    now = 0.0
    for rank, data, wait in chunks:
        now += wait
        some.console.tick(now)
        some.console.output(rank, 1, data, now)
        due = some.console.tick(now)
        assert due is None or due > now
        written[rank] += data
    shown = lines_of(some.stdout(), 3)
    assert [b"".join(lines) for lines in shown] == [text.replace(b"\n", b"") for text in written]


def test_streams_go_to_their_own_descriptors(memory):
    both = memory(world_size=1)
    both.console.output(0, 1, b"out\n", 0.0)
    both.console.output(0, 2, b"err\n", 0.0)
    both.console.say("ours")
    assert both.read() == (b"[0] out\n", b"[0] err\ndistlaunch: ours\n")


def test_streams_to_one_file_keep_the_ranks_order(memory):
    one = memory(world_size=2, same=True)
    one.console.output(0, 1, b"first\n", 0.0)
    one.console.output(0, 2, b"second\n", 0.01)
    one.console.output(0, 1, b"third\n", 0.02)
    one.console.tick(0.2)
    assert one.stdout() == b"[0] first\n[0] second\n[0] third\n"


def test_only_the_chosen_ranks_are_shown(memory):
    some = memory(world_size=4, show=frozenset({1, 3}))
    for rank in range(4):
        some.console.output(rank, 1, b"hi\n", 0.0)
    assert some.stdout() == b"[1,3] hi\n"


def test_no_rank_chosen_shows_only_launcher_lines(memory):
    none = memory(world_size=2, show=frozenset())
    none.console.output(0, 1, b"hi\n", 0.0)
    none.console.rank_ended(0, 0.0)
    none.console.say("ours", level="error")
    assert none.read() == (b"", b"distlaunch: ours\n")


def test_lines_of_one_shown_rank_are_not_held(memory):
    one = memory(world_size=4, show=frozenset({2}))
    one.console.output(2, 1, b"hi\n", 0.0)
    assert one.console.tick(0.0) is None
    assert one.stdout() == b"[2] hi\n"


def test_a_partial_line_is_shown_after_half_a_second_and_goes_on(memory):
    one = memory(world_size=1)
    one.console.output(0, 1, b"Continue? ", 1.0)
    assert one.console.tick(1.4) == 1.5
    assert one.console.tick(1.5) is None
    one.console.output(0, 1, b"yes", 2.0)
    one.console.output(0, 1, b"\nnext\n", 3.0)
    assert one.stdout() == b"[0] Continue? yes\n[0] next\n"


def test_a_partial_line_is_ended_when_another_rank_writes(memory):
    two = memory(world_size=2)
    two.console.output(0, 1, b"load", 0.0)
    two.console.tick(0.5)
    two.console.output(1, 1, b"hello\n", 0.6)
    two.console.tick(0.7)
    two.console.output(0, 1, b"ed\n", 0.8)
    assert two.stdout() == b"[0] load\n[1] hello\n[0] ed\n"


def test_no_empty_line_follows_a_partial_line_that_was_interrupted_at_its_end(memory):
    two = memory(world_size=2)
    two.console.output(0, 1, b"prompt", 0.0)
    two.console.tick(0.5)
    two.console.output(1, 1, b"hello\n", 0.6)
    two.console.tick(0.7)
    two.console.output(0, 1, b"\nnext\n", 0.8)
    assert two.stdout() == b"[0] prompt\n[1] hello\n[0] next\n"


def test_a_launcher_line_is_not_inside_a_workers_line(memory):
    one = memory(world_size=1, same=True)
    one.console.output(0, 1, b"prompt", 0.0)
    one.console.tick(0.5)
    one.console.say("two\nlines\n", level="warning")
    one.console.output(0, 1, b"!\n", 0.6)
    assert one.stdout() == b"[0] prompt\ndistlaunch: two\nlines\n[0] !\n"


def test_a_launcher_line_follows_the_whole_lines_held_before_it(memory):
    two = memory(world_size=2, same=True)
    two.console.output(0, 2, b"Traceback\n", 0.0)
    two.console.say("rank 0 failed", level="error")
    assert two.stdout() == b"[0] Traceback\ndistlaunch: rank 0 failed\n"


def test_a_last_line_without_newline_is_shown_when_its_rank_ends(memory):
    two = memory(world_size=2)
    two.console.output(0, 1, b"bye", 0.0)
    two.console.output(1, 1, b"bye", 0.0)
    two.console.rank_ended(0, 0.1)
    two.console.rank_ended(1, 0.1)
    assert two.console.tick(0.1) is None
    assert two.stdout() == b"[0-1] bye\n"


def test_a_new_attempt_starts_with_whole_lines(memory):
    one = memory(world_size=1)
    one.console.output(0, 1, b"half", 0.0)
    one.console.tick(0.5)
    one.console.rank_ended(0, 0.6)
    one.console.output(0, 1, b"\nagain\n", 0.7)
    assert one.stdout() == b"[0] half\n[0] \n[0] again\n"


def test_bytes_reach_a_file_as_they_are(memory):
    data = bytes(range(256)).replace(b"\n", b"").replace(b"\r", b"") + b"\x1b]0;t\x07\r\n"
    one = memory(world_size=1)
    one.console.output(0, 1, data, 0.0)
    assert one.stdout() == b"[0] " + data


def test_quiet_hides_information_but_no_warning(memory):
    one = memory(world_size=1, quiet=True)
    one.console.say("info")
    one.console.say("warning", level="warning")
    one.console.say("error", level="error")
    one.console.output(0, 1, b"output\n", 0.0)
    assert one.read() == (b"[0] output\n", b"distlaunch: warning\ndistlaunch: error\n")


def test_events_are_not_for_people(memory):
    one = memory(world_size=1)
    one.console.event({"event": "started"})
    assert one.read() == (b"", b"")


def test_no_colour_without_a_terminal(memory):
    one = memory(world_size=2, format="rich")
    one.console.output(0, 1, b"x\n", 0.0)
    one.console.say("careful", level="warning")
    assert b"\x1b" not in b"".join(one.read())


def test_a_line_of_32_megabytes_passes_whole_in_bounded_memory(memory):
    one = memory(world_size=2)
    piece = b"y" * (64 << 10)
    tracemalloc.start()
    try:
        for _ in range(512):
            one.console.output(0, 1, piece, 0.0)
            while not one.console.has_room():
                pass
        one.console.output(0, 1, b"\n", 0.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert one.stdout() == b"[0] " + piece * 512 + b"\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_millions_of_empty_lines_take_bounded_memory(memory, ranks):
    one = memory(world_size=ranks)
    tracemalloc.start()
    try:
        for _ in range(32):
            one.console.output(0, 1, b"\n" * (64 << 10), 0.0)
            while not one.console.has_room():
                pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert one.stdout() == b"[0] \n" * (32 * (64 << 10))


def test_a_closed_descriptor_does_not_disturb_the_job():
    console = open_console(world_size=1, environ={}, stdout_fd=987, stderr_fd=988)
    console.output(0, 1, b"x\n", 0.0)
    console.say("y")
    assert console.has_room()
    assert console.close(timeout_s=None) == len(b"[0] x\ndistlaunch: y\n")


# --- lines that are drawn over (progress bars)


def test_a_bar_in_a_file_is_its_last_state_behind_its_prefix(memory):
    two = memory(world_size=2)
    for rank in (0, 1):
        two.console.output(rank, 2, b"\rtrain:   0%|", 0.0)
        two.console.output(rank, 2, b"\rtrain:  50%|", 1.0)
        two.console.tick(1.0)
        two.console.output(rank, 2, b"\rtrain: 100%|\ndone\r\n", 2.0)
    assert two.read()[1] == b"[0-1] train: 100%|\n[0-1] done\r\n"


def test_a_growing_bar_shows_in_a_file_that_it_lives_every_ten_seconds(memory):
    one = memory(world_size=1)
    for tenth in range(351):
        one.console.output(0, 2, b"\r%d" % tenth, tenth / 10)
        due = one.console.tick(tenth / 10)
        assert due is None or due > tenth / 10
    one.console.output(0, 2, b"\n", 35.1)
    assert one.read()[1] == b"[0] 100\n[0] 200\n[0] 300\n[0] 350\n"


def test_bars_of_many_ranks_fold_in_a_file(memory):
    four = memory(world_size=4)
    for second in range(13):
        for rank in range(4):
            four.console.output(rank, 2, b"\r%d" % second, float(second))
        four.console.tick(float(second))
    assert four.read()[1] == b"[0-3] 10\n[0-3] 12\n"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r   \r", b"\r\x1b[K\n", b""])
def test_a_state_that_is_on_show_is_not_shown_again(memory, end):
    one = memory(world_size=1)
    one.console.output(0, 2, b"\r10%\r20%", 0.0)
    assert one.console.tick(0.0) == 10.0
    assert one.console.tick(10.0) is None
    one.console.output(0, 2, b"\r20%", 11.0)
    one.console.tick(20.0)
    one.console.output(0, 2, end, 21.0)
    one.console.rank_ended(0, 22.0)
    assert one.read()[1] == b"[0] 20%\n"


def test_a_bar_after_a_prompt_begins_a_new_line(memory):
    one = memory(world_size=1)
    one.console.output(0, 1, b"loading ", 0.0)
    one.console.tick(0.5)
    one.console.output(0, 1, b"\r10%", 1.0)
    one.console.output(0, 1, b"\r100%\nnext\n", 2.0)
    assert one.stdout() == b"[0] loading \n[0] 100%\n[0] next\n"


def test_a_state_of_a_growing_bar_has_no_half_character(memory):
    one = memory(world_size=1)
    one.console.output(0, 2, "\r1% █".encode()[:-1], 0.0)
    one.console.tick(10.0)
    one.console.output(0, 2, "█\n".encode()[2:], 11.0)
    assert one.read()[1].decode() == "[0] 1% \n[0] 1% █\n"


def test_a_state_without_end_takes_bounded_memory_and_loses_nothing(memory):
    one = memory(world_size=1)
    one.console.output(0, 1, b"10%\r", 0.0)
    piece = b"y" * 50_000
    tracemalloc.start()
    try:
        for _ in range(100):
            one.console.output(0, 1, piece, 0.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert one.stdout() == b"[0] " + piece * 100 + b"\n"
