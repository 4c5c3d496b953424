"""Draw the figures of a job for a terminal of any size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distlaunch.core.model.duration import format_age, format_duration
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import counted, format_ranks, printable
from distlaunch.jobs.top import NodeRow, RankOrder, RankRow, TopView, sorted_ranks

if TYPE_CHECKING:
    from rich.text import Text

WIDE = 120
"""From this width on, the reasons of stragglers stand in a column."""
_NODE_LINES = 6
"""Lines for nodes, with their heading, if the screen is full of ranks."""
_SEVERAL_NODE_SHARE = 3
"""Nodes get at most this fraction of the screen."""
_DROPPED = ("GPUMEM", "MEM", "STATE", "NODE", "SIGN", "LOSS", "GPU%", "CPU%", "STEP")
"""Columns that a narrow screen does not have. The first ones are dropped first."""
_HELP = (
    ("q", "quit; leave the stacks or this help"),
    ("Ctrl-C", "quit"),
    ("s", "sort by the next column: slowest, rank, cpu, memory, gpu, silent"),
    ("n", "show the ranks of the next node only; after the last node, of all"),
    ("a", "show the ranks of all nodes"),
    ("up, down, j, k", "choose a rank"),
    ("PgUp, PgDn", "choose a rank a screen further"),
    ("Enter", "show the Python stacks of the chosen rank"),
    ("?", "show or leave this help"),
)


class ScreenState(Record):
    """What the user has chosen."""

    order: RankOrder = RankOrder.SLOWEST
    node: int | None = None
    """Show only the ranks of this node."""
    chosen: int | None = None
    """The rank of the marked line."""
    shows_help: bool = False
    text: str = ""
    """Shown in place of the ranks, as stacks."""
    notice: str = ""
    """A line at the bottom."""
    is_interactive: bool = True


class _Column:
    def __init__(
        self, name: str, cell: Callable[[RankRow], str], *, left: bool = False, least: int = 0
    ) -> None:
        self.name = name
        self.cell = cell
        self.left = left
        self.least = least


def shown_ranks(view: TopView, state: ScreenState) -> list[RankRow]:
    """Return the rows of the ranks to show, in their order."""
    rows = [row for row in view.ranks if state.node is None or row.node == state.node]
    return sorted_ranks(rows, state.order)


def draw(
    view: TopView, state: ScreenState, *, width: int, height: int | None, now: float | None = None
) -> list[Text]:
    """Return the lines of a screen, none longer than ``width``: exactly ``height`` lines, or as
    many as all ranks and nodes need if that is None. ``now`` is in seconds since 1970."""
    lines = _heading_lines(view, time.time() if now is None else now)
    bottom = _bottom_lines(view, state, width) if state.is_interactive else []
    if state.shows_help or state.text:
        body = _help_lines() if state.shows_help else list(map(_text_line, state.text.splitlines()))
        room = None if height is None else max(0, height - len(lines) - len(bottom) - 1)
        lines += [_text_line(""), *body[:room]]
    else:
        lines += _body_lines(
            view, state, width, None if height is None else height - len(lines) - len(bottom)
        )
    if height is not None:
        lines = lines[: height - len(bottom)]
        lines += [_text_line("")] * (height - len(bottom) - len(lines))
    lines += bottom
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _text_line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style, no_wrap=True)


def _heading_lines(view: TopView, now: float) -> list[Text]:
    restarts = f", restarts {view.restarts} of {view.max_restarts}" if view.max_restarts else ""
    of = "?" if view.world_size is None else view.world_size
    lines = [
        _text_line(
            f"job {view.name}  {view.phase} for {format_age(now - view.started)}  "
            f"workers {view.workers_up}/{of}  attempt {view.attempt}{restarts}",
            "bold",
        )
    ]
    if view.equal_step_times:
        lines.append(
            _text_line(
                "equal step times: the ranks may wait for one; distlaunch stack shows for which",
                "dim",
            )
        )
    if view.unanswered:
        names = ", ".join(view.unanswered[:4])
        more = f" and {len(view.unanswered) - 4} more" if len(view.unanswered) > 4 else ""
        lines.append(_text_line(f"no answer from {names}{more}", "yellow"))
    return lines


def _bottom_lines(view: TopView, state: ScreenState, width: int) -> list[Text]:
    if state.notice:
        return [_text_line(state.notice, "yellow")]
    if state.shows_help or state.text:
        return [_text_line("q back  Ctrl-C quit".ljust(width), "reverse")]
    host = next((node.host for node in view.nodes if node.number == state.node), "all")
    keys = f"q quit  s sort: {state.order.value}  n node: {host}  Enter stacks  ? help"
    return [_text_line(keys.ljust(width), "reverse")]


def _help_lines() -> list[Text]:
    width = max(len(key) for key, _ in _HELP) + 2
    return [_text_line(f"{key:<{width}}{text}") for key, text in _HELP]


def _body_lines(view: TopView, state: ScreenState, width: int, room: int | None) -> list[Text]:
    nodes = [node for node in view.nodes if state.node in (None, node.number)]
    rows = shown_ranks(view, state)
    reasons = [] if width >= WIDE else _reason_lines(rows, room)
    node_room = None if room is None else max(_NODE_LINES, room // _SEVERAL_NODE_SHARE)
    node_lines = _node_lines(nodes, width, node_room)
    left = None if room is None else room - len(node_lines) - len(reasons) - 2
    return [
        _text_line(""),
        *node_lines,
        _text_line(""),
        *reasons,
        *_rank_lines(view, rows, state, width, left),
    ]


def _reason_lines(rows: Sequence[RankRow], room: int | None) -> list[Text]:
    slow = [row for row in rows if row.straggler is not None]
    most = len(slow) if room is None else 2
    lines = [
        _text_line(f"! rank {row.rank} on {row.host}: {row.straggler.words}", "red")
        for row in slow[:most]
        if row.straggler is not None
    ]
    if len(slow) > most:
        lines.append(_text_line(f"! and {counted(len(slow) - most, 'rank')} more", "red"))
    return lines


# --- tables


def _rank_lines(
    view: TopView, rows: Sequence[RankRow], state: ScreenState, width: int, room: int | None
) -> list[Text]:
    columns = _drop_columns(_choose_columns(view, width), rows, width)
    first, last = 0, len(rows)
    if room is not None and len(rows) > room - 1:
        count = max(1, room - 2)  # one line says how many are not shown
        at = next((at for at, row in enumerate(rows) if row.rank == state.chosen), 0)
        first = min(max(0, at - count // 2), max(0, len(rows) - count))
        last = first + count
    cells = [[column.cell(row) for column in columns] for row in rows[first:last]]
    widths = [
        max([len(column.name), column.least, *(len(row[number]) for row in cells)])
        for number, column in enumerate(columns)
    ]
    lines = [_text_line(_join_cells([column.name for column in columns], widths, columns), "bold")]
    for row, texts in zip(rows[first:last], cells, strict=True):
        style = "red" if row.straggler else "dim" if row.state != "running" else ""
        if row.rank == state.chosen and state.is_interactive:
            style += " reverse"
        lines.append(_text_line(_join_cells(texts, widths, columns), style.strip()))
    if last - first < len(rows):
        shown = f"{first + 1} to {last} of {counted(len(rows), 'rank')}"
        lines.append(_text_line(shown, "dim"))
    return lines


def _drop_columns(
    columns: Sequence[_Column], rows: Sequence[RankRow], width: int
) -> Sequence[_Column]:
    """Return the columns that fit into ``width``, without the least important ones."""
    sizes = {
        column.name: max([len(column.name), column.least, *(len(column.cell(row)) for row in rows)])
        for column in columns
    }
    for name in _DROPPED:
        if sum(sizes.values()) + len(sizes) - 1 <= width:
            break
        sizes.pop(name, None)
    return [column for column in columns if column.name in sizes]


def _join_cells(texts: Sequence[str], widths: Sequence[int], columns: Sequence[_Column]) -> str:
    return " ".join(
        text.ljust(width) if column.left else text.rjust(width)
        for text, width, column in zip(texts, widths, columns, strict=True)
    ).rstrip()


def _choose_columns(view: TopView, width: int) -> list[_Column]:
    longest = 12 if width < WIDE else 40
    rows = view.ranks
    found = [
        _Column("", lambda row: "!" if row.straggler else "", left=True, least=1),
        _Column("RANK", lambda row: str(row.rank)),
        _Column("NODE", lambda row: _cut_text(row.host, longest), left=True),
        _Column("STATE", _state_text, left=True, least=7),
        _Column("CPU%", lambda row: _number_text(row.cpu_percent, ".0f"), least=4),
        _Column("MEM", lambda row: size(row.rss_bytes), least=5),
    ]
    if any(row.gpus for row in rows):
        found += [
            _Column("GPU%", lambda row: _number_text(row.gpu_percent, ".0f")),
            _Column("GPUMEM", lambda row: size(row.gpu_bytes)),
        ]
    found += [
        _Column("STEP", lambda row: _number_text(row.step, ".10g"), least=6),
        _Column("STEP-TIME", lambda row: _duration_text(row.step_s)),
        _Column("LOSS", lambda row: _number_text(row.loss, ".4g"), least=6),
        _Column("SIGN", lambda row: _age_text(row.last_sign_age_s), least=5),
    ]
    if width >= WIDE:
        found += [
            _Column("PID", lambda row: "-" if row.pid is None else str(row.pid)),
            _Column("GPUS", lambda row: format_ranks(row.gpus) or "-"),
            _Column("REASON", lambda row: row.straggler.words if row.straggler else "", left=True),
        ]
    return found


def _state_text(row: RankRow) -> str:
    if row.state == "ended" and row.returncode is not None:
        return f"ended {row.returncode}"
    return row.state


def _node_lines(nodes: Sequence[NodeRow], width: int, room: int | None) -> list[Text]:
    longest = 12 if width < WIDE else 40
    heading = [
        "NODE",
        "STATE",
        "RANKS",
        "CPU%",
        "MEM",
        "NET-IN/s",
        "NET-OUT/s",
        "READ/s",
        "WRITE/s",
    ]
    most = len(nodes) if room is None or len(nodes) < room else max(0, room - 2)
    rows = [
        [
            _cut_text(node.host, longest),
            node.state,
            _cut_text(format_ranks(node.ranks) or "-", longest),
            _number_text(node.cpu_percent, ".0f"),
            "-"
            if node.used_bytes is None
            else f"{size(node.used_bytes)}/{size(node.memory_bytes)}",
            size(node.received_per_s),
            size(node.sent_per_s),
            size(node.read_per_s),
            size(node.written_per_s),
        ]
        for node in nodes[:most]
    ]
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = []
    for number, row in enumerate([heading, *rows]):
        texts = [
            text.ljust(width) if at < 3 else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(_text_line(" ".join(texts).rstrip(), "" if number else "bold"))
    if most < len(nodes):
        lines.append(_text_line(f"and {counted(len(nodes) - most, 'node')} more", "dim"))
    return lines


# --- figures


def size(count: float | None) -> str:
    """Return a number of bytes in at most five characters, as ``1.5G``; ``-`` if it is not
    known."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("", "K", "M", "G", "T"):
        if value < 1000 or unit == "T":
            return f"{value:.0f}{unit}" if value >= 100 or not unit else f"{value:.3g}{unit}"
        value /= 1024
    return "-"


def _duration_text(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def _age_text(seconds: float | None) -> str:
    return "-" if seconds is None else format_age(seconds)


def _number_text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cut_text(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
