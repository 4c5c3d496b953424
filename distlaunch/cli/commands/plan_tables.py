"""Print a plan as tables, from the content of ``plan-<attempt>.json``.

Nodes that are alike share a row, and so do workers that differ only in their numbers, so that a
plan of 16,384 nodes fits on one screen. A value that follows from the worker's numbers is printed
once as a pattern: ``rank-{rank}``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distlaunch.core.model.host_list import fold_hosts
from distlaunch.core.model.text import counted, format_ranks, name_ranks, printable
from distlaunch.core.model.variables import DEVICE_MASKS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NUMBERS = ("rank", "local_rank", "node_rank")
_UNSETTLED = "(settled at the start)"
_MOST_VALUES = 8
_MOST_NODES = 40
_LONGEST_LIST = 60
_PIPE_COLUMNS = 120
_HANG_ACTIONS = {"stop": "stopped", "restart": "restarted", "report": "reported"}
_MASKS = tuple(sorted(DEVICE_MASKS))

_Data = Mapping[str, Any]


class _Worker(NamedTuple):
    rank: int
    local_rank: int
    node_rank: int
    argv: Sequence[object]
    env: _Data
    cpus: tuple[int, ...]
    mask: str
    """Value of the device mask (such as CUDA_VISIBLE_DEVICES): ``none`` if it is empty, an empty
    string if it is not set."""


class _Group(NamedTuple):
    nodes: list[_Data]
    workers: list[_Worker]


def plan_table(plan_record: _Data, *, argv: Sequence[str] = ()) -> None:
    """Print a plan to stdout.

    ``argv`` is printed if the number of workers is not known yet. If the reader of stdout has gone,
    raises BrokenPipeError, or SystemExit with newer versions of rich.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS
    nodes = plan_record.get("nodes") or ()
    workers = [_workers_of(node) for node in nodes]
    groups = _group_nodes(nodes, workers)
    everyone = [worker for own in workers for worker in own]
    _print_facts(console, plan_record, len(everyone))
    _print_nodes(console, groups, plan_record.get("device"))
    _print_gpus(console, groups)
    _print_workers(console, groups)
    _print_commands(console, everyone, argv)
    _print_environment(
        console, everyone, plan_record.get("env") or {}, plan_record.get("env_given") or ()
    )
    notes = plan_record.get("notes") or ()
    if notes:
        _print_heading(console, "Notes")
        for note in notes:
            _print_line(console, str(note))


def _workers_of(node: _Data) -> list[_Worker]:
    node_rank = node.get("node_rank", 0)
    return [
        _Worker(
            worker.get("rank", 0),
            worker.get("local_rank", 0),
            node_rank,
            worker.get("argv") or (),
            worker.get("env") or {},
            tuple(worker.get("cpus") or ()),
            _device_mask(worker.get("env") or {}),
        )
        for worker in node.get("workers") or ()
    ]


def _group_nodes(nodes: Sequence[_Data], workers: Sequence[list[_Worker]]) -> list[_Group]:
    groups: dict[object, _Group] = {}
    for node, own in zip(nodes, workers, strict=True):
        told = tuple(
            str(node.get(key))
            for key in ("slots", "devices", "gpus", "user", "port", "chosen", "without")
        )
        key = told, tuple((worker.mask, worker.cpus) for worker in own)
        group = groups.setdefault(key, _Group([], []))
        group.nodes.append(node)
        group.workers.extend(own)
    return list(groups.values())


def _print_facts(console: Console, record: _Data, workers: int) -> None:
    nodes = len(record.get("nodes") or ())
    size = record.get("world_size", workers)
    shown = "workers: settled at the start" if size is None else counted(size, "worker")
    fewest, most = record.get("min_nodes", nodes), record.get("max_nodes", nodes)
    elastic = f" (elastic: {fewest} to {most})" if fewest != most else ""
    facts = [
        ("Job", record.get("job_id")),
        ("Source", record.get("source")),
        ("Backend", record.get("backend")),
        ("Size", f"{shown} on {counted(nodes, 'node')}{elastic}"),
        ("Spares", fold_hosts(map(str, record.get("spares") or ())) or None),
        ("Attempt", record.get("attempt")),
        ("Master", _master_text(record)),
        ("Directory", record.get("run_dir")),
        ("Workdir", record.get("workdir")),
        ("Restarts", _restarts_text(record)),
        ("Preload", ", ".join(record.get("preload") or ()) or None),
        (
            "Hangs",
            f"{_HANG_ACTIONS[record.get('hang_action', 'stop')]} after {hang_s:g} s of silence"
            if (hang_s := record.get("hang_timeout_s"))
            else None,
        ),
    ]
    for name, value in facts:
        if value is not None:
            console.print(f"{name:<10} {printable(str(value))}", soft_wrap=True)


def _restarts_text(record: _Data) -> str | None:
    if not record.get("max_restarts"):
        return None
    text = str(record["max_restarts"])
    if not (delay := record.get("restart_delay_s")):
        return text
    first_s, most_s = delay
    doubled = f", doubled up to {most_s:,.10g} s" if most_s > first_s else ""
    return f"{text}, each after {first_s:,.10g} s{doubled}"


def _master_text(record: _Data) -> str | None:
    if "master_addr" not in record:
        return None
    return f"{_value_text(record['master_addr'])}, port {_value_text(record.get('master_port'))}"


def _print_nodes(console: Console, groups: Sequence[_Group], device: object) -> None:
    table = _create_table("Nodes", "Hosts", "Workers on each", "Ranks", "GPUs", "CPUs")
    for group in groups[:_MOST_NODES]:
        first, cpus = group.nodes[0], {cpu for worker in group.workers for cpu in worker.cpus}
        slots = first.get("slots")
        table.add_row(
            _short_numbers(node.get("node_rank", 0) for node in group.nodes),
            _hosts_text(group.nodes),
            _UNSETTLED if slots is None else str(slots),
            _ranks_text(group.workers),
            _devices_text(first, device),
            format_ranks(cpus) if cpus else "any",
        )
    _print_heading(console, "Nodes")
    console.print(table)
    if len(groups) > _MOST_NODES:
        rest = sum(len(group.nodes) for group in groups[_MOST_NODES:])
        _print_line(
            console, f"and {counted(rest, 'node')} of {len(groups) - _MOST_NODES} more kinds"
        )


def _hosts_text(nodes: Sequence[_Data]) -> str:
    user, port = nodes[0].get("user"), nodes[0].get("port")
    before, after = f"{user}@" if user else "", f":port={port}" if port else ""
    known = fold_hosts(str(node["host"]) for node in nodes if node.get("host") is not None)
    labels = fold_hosts(str(node["label"]) for node in nodes if node.get("host") is None)
    unknown = f"({labels} not known)" if labels else ""
    return f"{printable(before)}{known}{after}{' ' * bool(known and unknown)}{unknown}"


def _devices_text(node: _Data, device: object) -> str:
    """Return the GPUs of a node. Those that are not known before the survey are shown by the
    indices that will be used."""
    devices = node.get("devices")
    if devices is not None:
        return _device_list_text(devices)
    if node.get("chosen"):
        places = format_ranks(node["chosen"])
    elif node.get("without"):
        places = f"all but {format_ranks(node['without'])}"
    else:
        slots = node.get("slots")
        places = format_ranks(range(slots)) if isinstance(slots, int) else "all"
    return places if device == "cuda" else f"{places}, if it has any"


def _device_list_text(devices: Sequence[object]) -> str:
    texts = list(map(str, devices))
    indices = [int(text) for text in texts if text.isascii() and text.isdecimal()]
    in_order = len(indices) == len(texts) and sorted(set(indices)) == indices
    return format_ranks(indices) if in_order and texts else printable(",".join(texts)) or "-"


def _print_gpus(console: Console, groups: Sequence[_Group]) -> None:
    """Print physical GPUs: behind a device mask, device 0 may be GPU 4."""
    for group in groups:
        gpus = [gpu for gpu in group.nodes[0].get("gpus") or () if gpu]
        if not gpus:
            continue
        table = _create_table("Local ranks", "Logical", "Physical", "UUID", "Name")
        for gpu in {gpu.get("device"): gpu for gpu in gpus}.values():
            device = str(gpu.get("device"))
            users = [
                worker
                for worker, each in zip(
                    group.workers, group.nodes[0].get("gpus") or (), strict=False
                )
                if each and each.get("device") == device
            ]
            mask = users[0].mask.split(",") if users else []
            table.add_row(
                format_ranks(worker.local_rank for worker in users) or "-",
                str(mask.index(device)) if device in mask else "-",
                _cell_text(gpu.get("index")),
                _cell_text(gpu.get("uuid")),
                _cell_text(gpu.get("name") or None),
            )
        _print_heading(console, f"GPUs of {_hosts_text(group.nodes)}")
        console.print(table)


def _print_workers(console: Console, groups: Sequence[_Group]) -> None:
    rows: dict[tuple[int, str, tuple[int, ...]], list[_Worker]] = {}
    for place, group in enumerate(groups[:_MOST_NODES]):
        for worker in group.workers:
            rows.setdefault((place, worker.mask, worker.cpus), []).append(worker)
    _print_heading(console, "Workers")
    if not rows:
        _print_line(console, _UNSETTLED)
        return
    table = _create_table("Ranks", "Local ranks", "Nodes", "Devices", "CPUs")
    for (_, mask, cpus), members in rows.items():
        table.add_row(
            _ranks_text(members),
            format_ranks({worker.local_rank for worker in members}),
            _short_numbers({worker.node_rank for worker in members}),
            _cell_text(mask or "-"),
            format_ranks(cpus) if cpus else "any",
        )
    console.print(table)


def _ranks_text(workers: Sequence[_Worker]) -> str:
    return _short_numbers(worker.rank for worker in workers) or _UNSETTLED


def _short_numbers(numbers: Iterable[int]) -> str:
    text = format_ranks(numbers)
    return text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST].rpartition(',')[0]},..."


def _print_commands(console: Console, workers: Sequence[_Worker], argv: Sequence[str]) -> None:
    _print_heading(console, "Command")
    commands: list[tuple[Sequence[object], list[int]]] = []
    if argv and not workers:
        commands.append((argv, []))
    for worker in workers:
        # Most workers have the command of the previous worker, or that of the first.
        known = next((ranks for argv, ranks in reversed(commands) if argv == worker.argv), None)
        if known is None:
            commands.append((worker.argv, known := []))
        known.append(worker.rank)
    for words, ranks in commands:
        # shlex.join is only for display. The command is run as a list of words.
        _print_line(
            console,
            (f"{name_ranks(ranks)}: " if len(commands) > 1 else "") + shlex.join(map(str, words)),
        )


def _print_environment(
    console: Console, workers: Sequence[_Worker], shared: _Data, given: Iterable[object]
) -> None:
    yours = [str(name) for name in given]
    common = {
        name: f"{name}={_value_text(value)}" for name, value in shared.items() if name not in yours
    }
    names = {name for worker in workers for name in worker.env}.difference(yours)
    varying: list[str] = []
    for name in sorted(names):
        values = [worker.env.get(name, _Missing) for worker in workers]
        if all(value == values[0] for value in values):
            common[name] = f"{name}={_value_text(values[0])}"
        else:
            common.pop(name, None)
            varying.append(f"{name}={_varying_text(name, workers, values)}")
    if common:
        _print_heading(console, "Environment of every worker")
        for name in sorted(common):
            _print_line(console, common[name])
    if varying:
        _print_heading(console, "Environment by worker")
        for text in varying:
            _print_line(console, text)
    if yours:
        _print_heading(console, "Environment given by you (values are not shown)")
        _print_line(console, " ".join(yours))


class _Missing: ...


def _varying_text(name: str, workers: Sequence[_Worker], values: Sequence[object]) -> str:
    numbers = sorted(_NUMBERS, key=lambda number: not name.startswith(number.upper()))
    pattern = _pattern(numbers, workers, values)
    if pattern is not None:
        return pattern
    ranks: dict[str, list[int]] = {}
    for worker, value in zip(workers, values, strict=True):
        ranks.setdefault("(not set)" if value is _Missing else _value_text(value), []).append(
            worker.rank
        )
    parts = [f"{text} ({_short_names(some)})" for text, some in list(ranks.items())[:_MOST_VALUES]]
    if len(ranks) > _MOST_VALUES:
        parts.append(f"... {len(ranks) - _MOST_VALUES} more")
    return ", ".join(parts)


def _short_names(ranks: Sequence[int]) -> str:
    text = name_ranks(ranks)
    return text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST].rpartition(',')[0]},..."


def _pattern(
    numbers: Sequence[str], workers: Sequence[_Worker], values: Sequence[object]
) -> str | None:
    """Return a value as a pattern; None if no number of a worker gives the value of every worker."""
    first = values[0]
    if not isinstance(first, str):
        return None
    for name in numbers:
        place = _Worker._fields.index(name)
        digits = str(workers[0][place])
        at = first.find(digits)
        while at >= 0:
            before, after = first[:at], first[at + len(digits) :]
            pairs = zip(workers, values, strict=True)
            if all(value == f"{before}{worker[place]}{after}" for worker, value in pairs):
                return f"{before}{{{name}}}{after}"
            at = first.find(digits, at + 1)
    return None


def _device_mask(env: _Data) -> str:
    for name in _MASKS:
        if env.get(name) is not None:
            return env[name] or "none"
    return ""


def _value_text(value: object) -> str:
    return _UNSETTLED if value is None else str(value)


def _cell_text(value: object) -> str:
    return "-" if value is None else printable(str(value))


def _print_heading(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold")


def _print_line(console: Console, text: str) -> None:
    console.print("  " + printable(text), soft_wrap=True)


def _create_table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=True, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
