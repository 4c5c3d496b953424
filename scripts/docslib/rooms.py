"""The picture of the architecture: the rooms on the floors of the import contract, and an arrow for
each pair of rooms with an import.

An arrow is thick if several modules of the room have such an import. Nearly every room imports the
lowest one; these arrows would hide the others, so the boxes name that room instead.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

from docslib.reference import DOCS

PACKAGE = DOCS.parent
ROOMS = DOCS / "rooms.svg"
_CONTRACT = "Rooms import downwards only"
_BOX = (164, 44)
_SLOTS = 7
"""Places for boxes on each floor. The box of the lowest floor is as wide as all of them."""
_SLOT, _FLOOR, _MARGIN = 104, 92, 44
_SEVERAL = 5
"""Modules with an import, from which on its arrow is thick. No number is shown: it would be out of
date after each change of the code."""
_WAYS = [(leave, meet) for leave in (0, 0.2, -0.2, 0.4, -0.4) for meet in (0, 0.2, -0.2, 0.4, -0.4)]
"""Where an arrow leaves a box, and where it meets another: parts of the width, from the middle."""
_STARTS = 6
"""Arrangements of boxes with which the search begins."""
_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="9" '
    'markerHeight="9" markerUnits="userSpaceOnUse" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 z" fill="#7986cb"/></marker></defs>'
)
_STYLE = """\
.room { fill: #eef2fb; stroke: #3f51b5; stroke-width: 1.5; }
.name { font: bold 15px sans-serif; fill: #1a237e; text-anchor: middle; }
.below { font: 11px sans-serif; fill: #555; text-anchor: middle; }
.arrow { stroke: #7986cb; stroke-width: 1.2; fill: none; marker-end: url(#head); }
.several { stroke-width: 3; }
"""

Point = tuple[float, float]
Arrows = Mapping[tuple[str, str], int]
"""Importing and imported room -> number of modules with such an import."""


@cache
def floors() -> list[list[str]]:
    """Return the rooms that exist, floor by floor from the top, as the contract lists them."""
    settings = (PACKAGE.parent / "pyproject.toml").read_text("utf-8")
    contract = settings.partition(f'name = "{_CONTRACT}"')[2]
    layers = re.search(r"^layers = (\[.*?^\])", contract, re.MULTILINE | re.DOTALL)
    if layers is None:
        raise SystemExit(f"docs: error: pyproject.toml has no contract {_CONTRACT!r}")
    rows = [
        [room for room in layer.split(" | ") if not room.startswith("(")]
        for layer in ast.literal_eval(layers[1])
    ]
    return [row for row in rows if row]


def arrows() -> Arrows:
    """Return the imports between rooms, counted from the source."""
    found: Counter[tuple[str, str]] = Counter()
    for room, path in modules():
        targets = {
            name.split(".")[1]
            for name in _imported(ast.parse(path.read_text("utf-8")))
            if name.startswith("distlaunch.")
        }
        found.update((room, target) for target in targets - {room} if _is_room(target))
    return found


def modules() -> Iterator[tuple[str, Path]]:
    """Yield each module, with its room."""
    for path in sorted(PACKAGE.rglob("*.py")):
        first, *rest = path.relative_to(PACKAGE).parts
        room = first if rest else path.stem
        if _is_room(room):
            yield room, path


def _is_room(name: str) -> bool:
    return any(name in row for row in floors())


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "distlaunch":
            yield from (f"distlaunch.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def draw_rooms() -> str:
    """Return the picture as SVG."""
    rows, found = floors(), arrows()
    lowest = rows[-1][0]
    places = _arrange(rows, found)
    width, height = _SLOTS * _SLOT + 2 * _MARGIN, len(rows) * _FLOOR + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>The rooms of distlaunch and the imports between them</title>",
        f"<style>\n{_STYLE}</style>",
        _HEAD,
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for pair, count in sorted(found.items()):
        if pair[1] == lowest:
            continue
        ((x1, y1), (x2, y2)), _ = _line(pair, places)
        kind = "arrow several" if count >= _SEVERAL else "arrow"
        lines.append(f'<path class="{kind}" d="M{x1:.0f} {y1:.0f} L{x2:.0f} {y2:.0f}"/>')
    for room, (x, y) in places.items():
        box_width, box_height = _SLOTS * _SLOT if room == lowest else _BOX[0], _BOX[1]
        left, top = x - box_width / 2, y - box_height / 2
        size = f'width="{box_width}" height="{box_height}"'
        below = f"imports {lowest}" if (room, lowest) in found else ""
        lines += [
            f'<rect class="room" x="{left:.0f}" y="{top:.0f}" {size} rx="6"/>',
            f'<text class="name" x="{x:.0f}" y="{y + (0 if below else 5):.0f}">{escape(room)}</text>',
        ]
        if below:
            lines.append(f'<text class="below" x="{x:.0f}" y="{y + 15:.0f}">{below}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _line(pair: tuple[str, str], places: Mapping[str, Point]) -> tuple[tuple[Point, Point], int]:
    """Return the two ends of an arrow, and how many boxes of other rooms it runs behind.

    Of several ways to leave the lower edge of a box and to meet the upper edge of another, the
    first with the fewest is taken.
    """
    (x1, y1), (x2, y2) = places[pair[0]], places[pair[1]]
    begin, end = y1 + _BOX[1] / 2, y2 - _BOX[1] / 2
    others = [place for room, place in places.items() if room not in pair and y1 < place[1] < y2]
    best: tuple[tuple[Point, Point], int] | None = None
    for leave, meet in _WAYS:
        left = x1 + leave * _BOX[0]
        ends = (left, begin), (x2 + meet * _BOX[0], end)
        hidden = sum(_runs_behind(ends, place) for place in others)
        if best is None or hidden < best[1]:
            best = ends, hidden
        if not hidden:
            break
    assert best is not None
    return best


# --- the place of each box


def _arrange(rows: Sequence[Sequence[str]], found: Arrows) -> dict[str, Point]:
    """Return the centre of each room's box, so that few arrows run behind another room's box.

    The search is the same each time: from several starts, each room goes to its best place until
    none can be improved.
    """
    choose = random.Random(1)
    best: tuple[int, dict[str, int]] | None = None
    for _ in range(_STARTS):
        slots = {
            room: slot
            for row in rows
            for room, slot in zip(row, sorted(_apart(choose, len(row))), strict=True)
        }
        cost = _cost(rows, slots, found)
        improved = True
        while improved:
            improved = False
            for row in rows:
                for room in row:
                    for slot in range(_SLOTS) if row is not rows[-1] else ():
                        moved = {**slots, room: slot}
                        if _too_near(row, moved) or (price := _cost(rows, moved, found)) >= cost:
                            continue
                        slots, cost, improved = moved, price, True
        if best is None or cost < best[0]:
            best = (cost, slots)
    return {} if best is None else _places(rows, best[1])


def _apart(choose: random.Random, number: int) -> list[int]:
    return sorted(range(0, _SLOTS, 2), key=lambda _: choose.random())[:number]


def _too_near(row: Sequence[str], slots: Mapping[str, int]) -> bool:
    taken = sorted(slots[room] for room in row)
    return any(after - before < 2 for before, after in pairwise(taken))


def _places(rows: Sequence[Sequence[str]], slots: Mapping[str, int]) -> dict[str, Point]:
    middle = _SLOTS // 2
    return {
        room: (
            _MARGIN + ((middle if row is rows[-1] else slots[room]) + 0.5) * _SLOT,
            _MARGIN / 2 + (floor + 0.5) * _FLOOR,
        )
        for floor, row in enumerate(rows)
        for room in row
    }


def _cost(rows: Sequence[Sequence[str]], slots: Mapping[str, int], found: Arrows) -> int:
    """Return how hard an arrangement is to read: arrows behind boxes count most, then lengths."""
    places = _places(rows, slots)
    lowest = rows[-1][0]
    drawn = [_line(pair, places) for pair in found if pair[1] != lowest]
    lengths = sum(abs(x1 - x2) for ((x1, _), (x2, _)), _ in drawn)
    return sum(hidden for _, hidden in drawn) * 100_000 + round(lengths)


def _runs_behind(ends: tuple[Point, Point], box: Point) -> bool:
    """Return whether an arrow passes through a box, or close to it."""
    (x1, y1), (x2, y2) = ends
    top, bottom = box[1] - _BOX[1] / 2, box[1] + _BOX[1] / 2
    at = [x1 + (x2 - x1) * (y - y1) / (y2 - y1) for y in (top, bottom)]
    near = _BOX[0] / 2 + 6
    return min(at) < box[0] + near and max(at) > box[0] - near
