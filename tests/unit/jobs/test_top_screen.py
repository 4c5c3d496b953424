"""The screens of ``top``, kept in ``tests/data/screens``. WRITE_SCREENS=1 writes them anew."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pyte
import pytest
from rich.console import Console

from distlaunch.core.model.record import replace
from distlaunch.jobs.top import RankOrder, view_of
from distlaunch.jobs.top_screen import ScreenState, draw, shown_ranks, size
from tests.facts import mentions

SCREENS = Path(__file__).parents[2] / "data" / "screens"
NOW = 1_700_003_725.0


def snapshot(ranks: int, nodes: int) -> dict:
    per_node = ranks // nodes
    return {
        "job_id": "20261130-001500-exp",
        "phase": "running",
        "attempt": 1,
        "restarts": 1,
        "max_restarts": 3,
        "started": 1_700_000_000.0,
        "world_size": ranks,
        "workers_up": ranks,
        "nodes": [
            {"number": node, "host": f"gpu{node:03}.cluster", "state": "up"}
            for node in range(nodes)
        ],
        "workers": [
            {
                "rank": rank,
                "node": rank // per_node,
                "host": f"gpu{rank // per_node:03}.cluster",
                "pid": 4000 + rank,
                "state": "ended" if rank == 1 else "running",
                "returncode": 0 if rank == 1 else None,
                "step": 1200.0 + rank % 3,
                "step_s": 0.25 + rank % 5 / 1000 + (0.4 if rank == ranks - 2 else 0),
                "timed_steps": 40.0,
                "loss": None if rank == 3 else 2.0625,
                "last_sign_age_s": 0.25 * (rank % 4),
            }
            for rank in range(ranks)
        ],
    }


def usage(ranks: int, nodes: int, second: int, *, gpus: bool = True, silent: int = -1) -> dict:
    per_node = ranks // nodes
    return {
        "attempt": 1,
        "unanswered": [f"gpu{silent:03}.cluster"] if silent >= 0 else [],
        "nodes": [
            {
                "node": node,
                "host": f"gpu{node:03}.cluster",
                "usage": {
                    "clock_s": 100.0 + second,
                    "agent_cpu_s": 1 + 0.005 * second,
                    "cpus": 64,
                    "memory_bytes": 512 << 30,
                    "available_bytes": 300 << 30,
                    "interfaces": [
                        {
                            "name": "eth0",
                            "received_bytes": (second << 20) * 30,
                            "sent_bytes": (second << 20) * (node + 1),
                        }
                    ],
                    "read_bytes": second * 4096,
                    "written_bytes": second << 30,
                    "workers": [
                        {
                            "rank": rank,
                            "pid": 4000 + rank,
                            "age_s": 60.0,
                            "processes": 5,
                            "cpu_s": 10.0 + second * (0.5 + rank % 8 / 10),
                            "rss_bytes": (3 << 30) + (rank << 24),
                            "gpus": [rank % per_node] if gpus else [],
                            "gpu_percent": 97.0 if gpus else None,
                            "gpu_bytes": 70 << 30 if gpus else None,
                        }
                        for rank in range(node * per_node, (node + 1) * per_node)
                    ],
                },
            }
            for node in range(nodes)
            if node != silent
        ],
    }


def make_view(ranks: int, nodes: int, **more):
    return view_of(
        snapshot(ranks, nodes), usage(ranks, nodes, 2, **more), usage(ranks, nodes, 0, **more)
    )


def on_terminal(lines, width: int, height: int) -> str:
    """Return the text of a terminal after these lines were printed to it."""
    output = io.StringIO()
    console = Console(
        file=output, width=width, height=height, force_terminal=True, color_system="standard"
    )
    for number, line in enumerate(lines):
        console.print(line, end="\r\n" if number < len(lines) - 1 else "", soft_wrap=True)
    screen = pyte.Screen(width, height)
    pyte.Stream(screen).feed(output.getvalue())
    return "\n".join(line.rstrip() for line in screen.display) + "\n"


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    ("ranks", "nodes", "more"),
    [(4, 1, {"gpus": False}), (4, 2, {"silent": 1}), (512, 64, {})],
    ids=["cpu-4", "gpu-4", "gpu-512"],
)
def test_the_screen_is_the_recorded_one(ranks, nodes, more, width):
    height = 24 if width == 80 else 50
    state = ScreenState(chosen=ranks - 2)
    lines = draw(make_view(ranks, nodes, **more), state, width=width, height=height, now=NOW)
    assert len(lines) == height
    shown = on_terminal(lines, width, height)
    path = SCREENS / f"top-{ranks}-{nodes}-{width}.txt"
    if os.environ.get("WRITE_SCREENS"):
        path.write_text(shown)
    assert shown == path.read_text()


@pytest.mark.parametrize(("width", "height"), [(1, 1), (20, 5), (40, 10), (500, 3), (80, 2)])
@pytest.mark.parametrize("ranks", [4, 512])
def test_the_lines_fit_a_terminal_of_any_size(ranks, width, height):
    lines = draw(make_view(ranks, 4), ScreenState(), width=width, height=height, now=NOW)
    assert len(lines) <= max(height, 1)
    assert all(line.cell_len <= width for line in lines)


def test_everything_is_printed_where_the_height_does_not_matter():
    state = ScreenState(is_interactive=False)
    text = "\n".join(
        line.plain for line in draw(make_view(512, 64), state, width=80, height=None, now=NOW)
    )
    assert all(mentions(text, f"gpu{node:03}") for node in range(64))
    assert len(text.splitlines()) > 512 + 64
    assert "quit" not in text


def test_a_node_chosen_hides_the_ranks_of_the_others():
    view = make_view(512, 64)
    rows = shown_ranks(view, ScreenState(node=3, order=RankOrder.RANK))
    assert [row.rank for row in rows] == list(range(24, 32))


def test_stacks_and_help_take_the_place_of_the_ranks():
    view = make_view(4, 1)
    for state in (ScreenState(text="train.py:7 in step\nx\x1b[31m"), ScreenState(shows_help=True)):
        lines = draw(view, state, width=80, height=24, now=NOW)
        text = "\n".join(line.plain for line in lines)
        assert "STEP-TIME" not in text
        assert "\x1b" not in text
    assert mentions(text, "quit")


def test_a_line_says_that_step_times_are_equal_and_names_stack():
    for is_equal in (True, False):
        view = replace(make_view(4, 1), equal_step_times=is_equal)
        lines = draw(view, ScreenState(), width=120, height=24, now=NOW)
        assert mentions("\n".join(line.plain for line in lines), "distlaunch stack") == is_equal


@pytest.mark.parametrize("width", [30, 40, 60])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_narrow_screen_drops_columns_and_keeps_the_step_times(width, nodes):
    lines = draw(make_view(4, nodes), ScreenState(), width=width, height=30, now=NOW)
    text = [line.plain for line in lines]
    heading = next(line for line in text if "RANK " in line and "STEP-TIME" in line)
    rows = text[text.index(heading) + 1 :][:4]
    assert not any(row.endswith("…") for row in rows)
    assert mentions(rows[0], "652 ms")
    assert "MEM" not in heading


def test_stacks_and_help_say_how_to_leave_them():
    for state in (ScreenState(text="train.py:7 in step"), ScreenState(shows_help=True)):
        last = draw(make_view(4, 1), state, width=80, height=24, now=NOW)[-1].plain
        assert mentions(last, "back", "Ctrl-C")


def test_names_of_hosts_cannot_control_the_terminal():
    view = make_view(4, 1)
    view = replace(
        view, job_id="\x1b[2J", ranks=tuple(replace(row, host="\x1b]0;x\a") for row in view.ranks)
    )
    lines = draw(view, ScreenState(), width=80, height=24, now=NOW)
    assert not any("\x1b" in line.plain or "\a" in line.plain for line in lines)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "0.977K"), (3 << 30, "3G"), (1536 << 20, "1.5G"), (None, "-")],
)
def test_sizes_are_short(count, text):
    assert size(count) == text
