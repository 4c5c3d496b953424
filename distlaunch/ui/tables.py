"""Layer ui: a plan as tables for people; ``plan --format json`` prints the same record as data.

The record is the one that ``plan-<k>.json`` holds. Workers that differ only in their numbers share a row, so that a
plan of 64 workers on 8 nodes reads in 8 rows; a variable whose value follows from the worker's numbers is written once,
as ``rank-{rank}``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distlaunch.core.model.ids import format_ranks, name_ranks
from distlaunch.core.model.text import printable
from distlaunch.core.model.variables import DEVICE_MASKS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NUMBERS = ("rank", "local_rank", "node_rank")
_UNSETTLED = "(settled at the start)"
_MOST_VALUES = 8
_PIPE_COLUMNS = 120


def plan_table(plan_record: Mapping[str, Any]) -> None:
    """Print a plan to stdout; where nobody reads on, raises BrokenPipeError or (newer rich) SystemExit."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS
    workers: Sequence[Mapping[str, Any]] = plan_record.get("workers") or ()
    _facts(console, plan_record, workers)
    _nodes(console, plan_record.get("nodes") or (), workers)
    _workers(console, workers)
    _commands(console, workers)
    _environment(console, workers, plan_record.get("env_given") or ())
    notes = plan_record.get("notes") or ()
    if notes:
        _heading(console, "Notes")
        for note in notes:
            _line(console, str(note))


def _facts(console: Console, record: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> None:
    nodes = len(record.get("nodes") or ())
    size = record.get("world_size", len(workers))
    facts = [
        ("Job", record.get("job_id")),
        ("Backend", record.get("backend")),
        ("Size", f"{_count(size, 'worker')} on {_count(nodes, 'node')}"),
        ("Attempt", record.get("attempt")),
        ("Master", _master(record)),
        ("Directory", record.get("run_dir")),
        ("Workdir", record.get("workdir")),
        ("Restarts", record.get("max_restarts") or None),
        ("Preload", ", ".join(record.get("preload") or ()) or None),
        ("Hangs", f"stopped after {hang_s:g} s of silence" if (hang_s := record.get("hang_timeout_s")) else None),
    ]
    for name, value in facts:
        if value is not None:
            console.print(f"{name:<10} {printable(str(value))}", soft_wrap=True)


def _master(record: Mapping[str, Any]) -> str | None:
    """Name rank 0's address and port, if the record says anything of them."""
    if "master_addr" not in record:
        return None
    return f"{_value(record['master_addr'])}, port {_value(record.get('master_port'))}"


def _nodes(console: Console, nodes: Sequence[Mapping[str, Any]], workers: Sequence[Mapping[str, Any]]) -> None:
    cpus: dict[Any, set[int]] = {}
    for worker in workers:
        cpus.setdefault(worker.get("node_rank"), set()).update(worker.get("cpus") or ())
    table = _table("Node", "Host", "Slots", "GPUs", "CPUs")
    for node in nodes:
        bound = cpus.get(node.get("node_rank"))
        table.add_row(
            _cell(node.get("node_rank")),
            _cell(node.get("host")),
            _cell(node.get("slots")),
            _devices(node.get("devices") or ()),
            format_ranks(bound) if bound else "any",
        )
    _heading(console, "Nodes")
    console.print(table)


def _workers(console: Console, workers: Sequence[Mapping[str, Any]]) -> None:
    """Print one row for each run of workers that differ in rank and local rank alone."""
    rows: list[tuple[tuple[str, ...], list[Mapping[str, Any]]]] = []
    for worker in workers:
        cpus = worker.get("cpus")
        key = (_cell(worker.get("node_rank")), _mask(worker), format_ranks(cpus) if cpus else "any")
        if not rows or rows[-1][0] != key:
            rows.append((key, []))
        rows[-1][1].append(worker)
    table = _table("Ranks", "Local ranks", "Node", "Devices", "CPUs")
    for (node, mask, cpus), members in rows:
        ranks, local_ranks = (
            format_ranks([worker[name] for worker in members if worker.get(name) is not None])
            for name in ("rank", "local_rank")
        )
        table.add_row(ranks, local_ranks, node, mask, cpus)
    _heading(console, "Workers")
    console.print(table)


def _commands(console: Console, workers: Sequence[Mapping[str, Any]]) -> None:
    _heading(console, "Command")
    by_argv: dict[tuple[str, ...], list[int]] = {}
    for worker in workers:
        by_argv.setdefault(tuple(map(str, worker.get("argv") or ())), []).append(worker.get("rank", 0))
    for argv, ranks in by_argv.items():
        # For reading only: what runs stays a list.
        _line(console, (f"{name_ranks(ranks)}: " if len(by_argv) > 1 else "") + shlex.join(argv))


def _environment(console: Console, workers: Sequence[Mapping[str, Any]], given: Iterable[object]) -> None:
    yours = [str(name) for name in given]
    names = sorted({name for worker in workers for name in worker.get("env") or ()}.difference(yours))
    common: list[str] = []
    varying: list[str] = []
    for name in names:
        values = [(worker.get("env") or {}).get(name, _Missing) for worker in workers]
        if all(value == values[0] for value in values):
            common.append(f"{name}={_value(values[0])}")
        else:
            varying.append(f"{name}={_varying(name, workers, values)}")
    if common:
        _heading(console, "Environment of every worker")
        for text in common:
            _line(console, text)
    if varying:
        _heading(console, "Environment by worker")
        for text in varying:
            _line(console, text)
    if yours:
        _heading(console, "Environment given by you (values are not shown)")
        _line(console, " ".join(yours))


class _Missing:
    """Stands for a variable that a worker does not have."""


def _varying(name: str, workers: Sequence[Mapping[str, Any]], values: Sequence[object]) -> str:
    """Write a variable that differs between workers: as a pattern of the worker's numbers, else value by value."""
    numbers = sorted(_NUMBERS, key=lambda number: not name.startswith(number.upper()))
    pattern = _pattern(numbers, workers, values)
    if pattern is not None:
        return pattern
    ranks: dict[str, list[int]] = {}
    for worker, value in zip(workers, values, strict=True):
        text = "(not set)" if value is _Missing else _value(value)
        ranks.setdefault(text, []).append(worker.get("rank", 0))
    parts = [f"{text} ({name_ranks(some)})" for text, some in list(ranks.items())[:_MOST_VALUES]]
    if len(ranks) > _MOST_VALUES:
        parts.append(f"... {len(ranks) - _MOST_VALUES} more")
    return ", ".join(parts)


def _pattern(numbers: Sequence[str], workers: Sequence[Mapping[str, Any]], values: Sequence[object]) -> str | None:
    """Find the one number in the first worker's value which, put in for each worker, gives every value."""
    first = values[0]
    if not isinstance(first, str):
        return None
    for name in numbers:
        digits = str(workers[0].get(name))
        at = first.find(digits)
        while at >= 0:
            before, after = first[:at], first[at + len(digits) :]
            if all(
                value == f"{before}{worker.get(name)}{after}" for worker, value in zip(workers, values, strict=True)
            ):
                return f"{before}{{{name}}}{after}"
            at = first.find(digits, at + 1)
    return None


def _mask(worker: Mapping[str, Any]) -> str:
    env = worker.get("env") or {}
    masks = [env[name] for name in sorted(DEVICE_MASKS) if env.get(name) is not None]
    return _cell(masks[0] or "none") if masks else "-"


def _devices(devices: Sequence[object]) -> str:
    """List devices, indices the short way."""
    indices = [device for device in devices if isinstance(device, int)]
    if len(indices) == len(devices):
        return format_ranks(indices) or "-"
    return ", ".join(map(_device, devices))


def _device(device: object) -> str:
    """Name a device that the record gives as an index, a UUID or an object."""
    if isinstance(device, Mapping):
        device = next((device[key] for key in ("index", "uuid", "name") if device.get(key) is not None), "?")
    return _cell(device)


def _value(value: object) -> str:
    return _UNSETTLED if value is None else str(value)


def _cell(value: object) -> str:
    return "-" if value is None else printable(str(value))


def _count(number: object, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold")


def _line(console: Console, text: str) -> None:
    """Print one indented line, never broken, so that it can be copied."""
    console.print("  " + printable(text), soft_wrap=True)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=True, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
