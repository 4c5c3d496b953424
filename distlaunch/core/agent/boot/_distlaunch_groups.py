"""Answer the agent about this worker's process groups of torch.distributed.

A rank that waits in a collective runs no signal handler, so a thread answers. It starts when
torch.distributed has its default process group; before that, and in programs without
torch.distributed, there is none. It sleeps until the agent connects to its socket.

``sitecustomize.py`` runs this file when torch's module is imported.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MODULE = "torch.distributed.distributed_c10d"
_CREDENTIALS = 12
"""Bytes of the kernel's struct ucred: pid, uid, gid."""
_MOST_GROUPS = 64


def watch(cookie: str) -> None:
    """Start the thread once the default process group exists. ``cookie`` is the agent's."""
    module: Any = sys.modules[MODULE]
    set_group = module._update_default_pg  # noqa: SLF001 - torch has no public hook
    started: list[str] = []

    def update_default_pg(group: "Any") -> "Any":
        result = set_group(group)
        if group is not None and not started:
            started.append(cookie)
            _start_thread(cookie)
        return result

    module._update_default_pg = update_default_pg  # noqa: SLF001


def _start_thread(cookie: str) -> None:
    import _thread
    import hashlib
    import os
    import socket

    name = hashlib.sha256(f"{cookie} {os.getpid()}".encode()).hexdigest()[:32]
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0distlaunch-{name}")  # as in agent/workers/flight_record.py
        listener.listen(1)
        _thread.start_new_thread(_serve_records, (listener,))
    except (OSError, RuntimeError):
        pass  # the agent gets no answer


def _serve_records(listener: "Any") -> None:
    """Send torch's record to each client of the same user."""
    import os
    import socket

    while True:
        try:
            client, _ = listener.accept()
            with client:
                client.settimeout(1.0)
                who = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS)
                if int.from_bytes(who[4:8], sys.byteorder) == os.getuid():
                    client.sendall(_record())
        except OSError:
            if listener.fileno() < 0:
                return
        except Exception:  # noqa: BLE001 - torch's function has failed: the agent gets no answer
            pass


def _record() -> bytes:
    """Return torch's record of the collectives that have not ended, as JSON or as a pickle."""
    torch: Any = sys.modules["torch._C._distributed_c10d"]
    as_json = getattr(torch, "_dump_fr_trace_json", None)
    if as_json is not None:
        return _with_groups(bytes(as_json(includeCollectives=True, onlyActive=True)))
    return bytes(
        torch._dump_fr_trace(  # noqa: SLF001 - torch has no public one
            includeCollectives=True, includeStackTraces=False, onlyActive=True
        )
    )


def _with_groups(record: bytes) -> bytes:
    """Add ``distlaunch_groups`` to a record: name and description of this worker's groups, in the
    order in which they were made. torch's record has no group without a collective."""
    import json

    try:
        names = list(sys.modules[MODULE]._world.pg_names.items())  # noqa: SLF001
        groups = [
            (str(name), str(getattr(group, "group_desc", "")))
            for group, name in names[:_MOST_GROUPS]
        ]
    except (AttributeError, RuntimeError):  # a torch without it, or groups that change
        return record
    text = json.dumps(groups).encode()
    return b'{"distlaunch_groups":' + text + b"," + record[1:] if record[:1] == b"{" else record
