"""Ask workers for torch.distributed's record of their collectives (its flight recorder).

A thread in the worker, started by ``boot/_distlaunch_groups.py``, answers at a Unix socket in the
abstract namespace. What it sends comes from a worker: it is bounded, and a pickle may have plain
data only.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distlaunch.core.protocol import agent_messages as m

_MOST_BYTES = 4 << 20
_GROUPS = 16
"""Largest number of process groups of a worker in an answer."""
_GROUPS_MADE = 64
"""Largest number of groups that ``boot/_distlaunch_groups.py`` sends."""
_TEXT_CHARS = 200
_DIMENSIONS = 16
"""Largest number of dimensions of a tensor."""
_CREDENTIALS = struct.Struct("3i")


def socket_name(cookie: str, pid: int) -> str:
    """Return the name of the socket of a worker, as ``boot/_distlaunch_groups.py`` has it.

    All users of the machine can see such names, so it does not show the cookie.
    """
    import hashlib

    return "\0distlaunch-" + hashlib.sha256(f"{cookie} {pid}".encode()).hexdigest()[:32]


def read_records(
    cookie: str, pids: Mapping[int, int], *, until_s: float
) -> dict[int, tuple[m.ProcessGroup, ...]]:
    """Return the process groups of each worker (rank -> pid) that answers until ``until_s``
    (monotonic)."""
    clients: dict[int, tuple[int, socket.socket, bytearray]] = {}
    poll = select.poll()
    found: dict[int, tuple[m.ProcessGroup, ...]] = {}
    for rank, pid in pids.items():
        client = _connect(socket_name(cookie, pid), pid)
        if client is not None:
            clients[client.fileno()] = rank, client, bytearray()
            poll.register(client, select.POLLIN)
    try:
        while clients and (left_s := until_s - time.monotonic()) > 0:
            for number, _ in poll.poll(left_s * 1000):
                rank, client, data = clients[number]
                if _read(client, data):
                    continue
                poll.unregister(client)
                client.close()
                del clients[number]
                found[rank] = parse_record(bytes(data))
    finally:
        for _, client, _ in clients.values():
            client.close()
    return found


def _connect(name: str, pid: int) -> socket.socket | None:
    """Return a connection to a worker; None if it does not listen."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    client.setblocking(False)  # noqa: FBT003 - positional-only in the standard library
    try:
        client.connect(name)
        who = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(who)[:2] == (pid, os.getuid()):
            return client
    except OSError:
        pass
    client.close()
    return None


def _read(client: socket.socket, data: bytearray) -> bool:
    """Read what has arrived. Return whether more may come."""
    try:
        block = client.recv(1 << 16)
    except BlockingIOError:
        return True
    except OSError:
        return False
    data += block
    return bool(block) and len(data) <= _MOST_BYTES


class _PlainUnpickler(pickle._Unpickler):  # noqa: SLF001 - the one in C cannot refuse keys
    """Unpickles dicts, lists, tuples, strings and numbers. Refuses everything else.

    Keys of dicts are strings or integers: the hash of nested tuples that share their items would take
    a time without bound.
    """

    dispatch = {  # noqa: RUF012 - as in the base class
        opcode[0]: pickle._Unpickler.dispatch[opcode[0]]  # noqa: SLF001
        for opcode in (
            *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
            *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
            *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
            *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
            *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
            *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
            *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT),
            *(pickle.BINGET, pickle.LONG_BINGET),
        )
    }

    stack: list[Any]
    """Of the base class, like ``pop_mark``."""
    pop_mark: Callable[[], list[Any]]

    def _set_item(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._fill(self.stack[-1], [key, value])

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._fill(self.stack[-1], items)

    def _fill(self, into: object, items: list[object]) -> None:
        if not isinstance(into, dict):
            raise pickle.UnpicklingError(type(into).__name__)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int)):
                raise pickle.UnpicklingError(type(key).__name__)
            into[key] = value

    dispatch[pickle.SETITEM[0]] = _set_item  # type: ignore[assignment]  # a method of this class
    dispatch[pickle.SETITEMS[0]] = _set_items  # type: ignore[assignment]  # a method of this class


def parse_record(data: bytes) -> tuple[m.ProcessGroup, ...]:
    """Return the process groups in torch's record, as JSON or as a pickle. Return an empty tuple for
    anything else."""
    if len(data) > _MOST_BYTES:
        return ()
    try:
        is_json = data.startswith(b"{")
        record = json.loads(data) if is_json else _PlainUnpickler(io.BytesIO(data)).load()
    except Exception:  # noqa: BLE001 - a broken pickle raises any error
        return ()
    try:
        return _groups_in(record)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError):
        return ()


def _groups_in(record: Any) -> tuple[m.ProcessGroup, ...]:
    pending: dict[str, list[Mapping[str, Any]]] = {}
    for entry in record.get("entries", ()):
        if not entry["is_p2p"] and not entry["retired"] and entry["state"] != "completed":
            pending.setdefault(_short_text(entry["pg_id"]), []).append(entry)
    made = _groups_made(record.get("distlaunch_groups"), pending, record["pg_status"])
    found = {}
    for key, status in list(record["pg_status"].items())[:_GROUPS]:
        number = _short_text(key)
        entries = sorted(pending.get(number, ()), key=lambda each: int(each["collective_seq_id"]))
        oldest = entries[0] if entries else None
        name, description = made.get(number, (number, "")) if oldest is None else _names(oldest)
        found[number] = m.ProcessGroup(
            number=name,
            name=description,
            enqueued=int(status["last_enqueued_collective"]),
            pending=None if oldest is None else int(oldest["collective_seq_id"]),
            operation="" if oldest is None else _operation(oldest),
            sizes="" if oldest is None else _sizes_text(oldest["input_sizes"]),
        )
    for number, (name, description) in made.items():
        if number not in found and len(found) < _GROUPS:  # without any collective so far
            found[number] = m.ProcessGroup(
                number=name, name=description, enqueued=0, pending=None, operation="", sizes=""
            )
    return tuple(found.values())


def _groups_made(
    given: Any, pending: Mapping[str, Sequence[Mapping[str, Any]]], status: Iterable[object]
) -> dict[str, tuple[str, str]]:
    """Return name and description of each group by torch's number for it.

    The number counts the groups that a worker has made, so it differs between workers. The name is
    the same in all. Returns nothing if groups were destroyed, so that the count is not known.
    """
    if not isinstance(given, list):
        return {}
    made = {
        str(number): (_short_text(name), _short_text(description))
        for number, (name, description) in enumerate(given)
    }
    for number, entries in pending.items():
        if made.get(number) != _names(entries[0]):
            return {}
    if len(made) < _GROUPS_MADE and not {_short_text(key) for key in status} <= made.keys():
        return {}  # a number that is too high: groups before it are gone
    return made


def _names(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and description of the group of a collective."""
    words = list(entry["process_group"])
    if len(words) < 2:
        return _short_text(entry["pg_id"]), ""
    return _short_text(words[0]), _short_text(words[1])


def _operation(entry: Mapping[str, Any]) -> str:
    """Return the name of a collective, without its backend: ``gloo:all_reduce``."""
    return _short_text(entry["profiling_name"]).rpartition(":")[2]


def _short_text(value: object) -> str:
    """Return a string or a small number as short text. Raises ValueError for anything else.

    Lists of a pickle may share their items, so that their text would have no bound.
    """
    if isinstance(value, str):
        return value[:_TEXT_CHARS]
    if _is_number(value):
        return str(value)
    raise ValueError(type(value).__name__)


def _sizes_text(given: object) -> str:
    """Return sizes of tensors as short text. Raises ValueError for anything else."""
    if not isinstance(given, list):
        raise ValueError(type(given).__name__)  # noqa: TRY004 - the record is odd, not the call
    first = given[:_TEXT_CHARS]
    for size in first:
        if not isinstance(size, list) or len(size) > _DIMENSIONS or not all(map(_is_number, size)):
            raise ValueError(type(size).__name__)
    return json.dumps(first)[:_TEXT_CHARS]


def _is_number(value: object) -> bool:
    return isinstance(value, int) and value.bit_length() < 64
