"""Prepare a node for an attempt before its workers start.

The GPU memory of the previous attempt must have been released. The master's node reserves a port
for rank 0, and listens on it for the reachability test. If workers listen themselves, each node
reserves ports for them.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from distlaunch.core.agent.node.ports import HeldPort, PortUse, hold_port
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.protocol import agent_messages as m

if TYPE_CHECKING:
    import socket

    from distlaunch.core.agent.node.horovod_store import HorovodStore

GPU_RELEASE_S = 30.0
"""How long the driver may take to release the GPU memory of ended processes."""
_ACCEPTED_AT_ONCE = 256
"""Largest number of connections to answer at once."""


class GpusReleased(Record):
    """The wait for GPU memory has ended. ``holders`` are pids that still hold memory."""

    prepare: m.Prepare
    holders: tuple[int, ...]


class AttemptSetup:
    """Handles ``Prepare`` messages, and holds ports until the workers bind them."""

    def __init__(
        self,
        *,
        port: HeldPort | None,
        send: Callable[[m.FromAgent], None],
        post: Callable[[GpusReleased | m.AgentFailed], None],
        hold: Callable[..., HeldPort] = hold_port,
    ) -> None:
        """``port``: the reserved port of the first attempt. ``post`` is called from another thread.
        ``hold`` reserves a port."""
        self._port = port
        self._hold_port = hold
        self._worker_ports: list[HeldPort] = []
        self._send = send
        self._post = post
        self._listener: socket.socket | None = None
        self._store: HorovodStore | None = None
        self._port_use: PortUse | None = None
        """Watches rank 0's port while the workers of an attempt run."""
        self._token_line = b""
        self._latest: m.Prepare | None = None
        """The latest ``Prepare`` message. The result of an earlier wait is ignored."""

    def prepare(self, message: m.Prepare, *, owner: str, pids: Collection[int]) -> None:
        """Reserve ports and send ``Prepared``. With ``pids``, a thread first waits until the driver
        has released the GPU memory of these ended processes."""
        self._latest = message
        if not pids:
            self._reserve_ports(message, owner, warning=None)
            return
        from distlaunch.core.probe.nvidia import await_memory_release

        ended = frozenset(pids)

        def wait() -> None:
            holders = await_memory_release(ended, bound_s=GPU_RELEASE_S, environ=os.environ)
            self._post(GpusReleased(prepare=message, holders=holders))

        try:
            threading.Thread(target=wait, name="gpu memory", daemon=True).start()
        except RuntimeError:  # the limit of processes is reached: continue without waiting
            self._reserve_ports(
                message, owner, warning="no thread can wait for the memory of the GPUs"
            )

    def on_gpus_released(self, event: GpusReleased, *, owner: str) -> None:
        """Continue after the wait for GPU memory, unless a later ``Prepare`` has come."""
        if event.prepare is not self._latest:
            return
        held = ", ".join(map(str, event.holders))
        self._reserve_ports(
            event.prepare,
            owner,
            warning=f"GPU memory is still held by the ended process {held}" if held else None,
        )

    def _reserve_ports(self, message: m.Prepare, owner: str, *, warning: str | None) -> None:
        """Reserve the ports of an attempt, and answer with ``Prepared``.

        Ports of an earlier attempt are released if they do not fit. ``owner`` is the job's id,
        ``warning`` is passed on in the answer.
        """
        if (
            message.attempt > 0
            or message.port is None
            or (self._port and message.port not in (0, self._port.number))
        ):
            self.release()
        problem = hint = None
        try:
            if message.port is not None and self._port is None:
                self._port = self._hold_port(message.port, owner=owner)
            while len(self._worker_ports) < message.ports:
                self._worker_ports.append(self._hold_port(0, owner=owner))
            if self._port is not None and message.token:
                self._listen(self._port, message.token)
        except ConfigError as exc:
            problem, hint = exc.message, exc.hint
        number = self._port.number if self._port and not problem else None
        worker_ports = () if problem else tuple(port.number for port in self._worker_ports)
        self._send(
            m.Prepared(
                attempt=message.attempt,
                port=number,
                problem=problem,
                hint=hint,
                warning=warning,
                ports=worker_ports,
            )
        )

    # --- for the reachability test of other nodes

    def _listen(self, port: HeldPort, token: str) -> None:
        self._close_listener()
        self._token_line = token.encode() + b"\n"
        try:
            self._listener = port.listener()
        except OSError as exc:
            raise ConfigError(
                f"cannot listen on port {port.number}: {os.strerror(exc.errno or 0)}"
            ) from exc

    def descriptors(self) -> dict[int, int]:
        """Return the poll events by descriptor."""
        return {} if self._listener is None else {self._listener.fileno(): select.POLLIN}

    def on_ready(self) -> None:
        """Send the token to new clients."""
        if self._listener is None:
            return
        with suppress(BlockingIOError):
            for _ in range(_ACCEPTED_AT_ONCE):
                with suppress(ConnectionError):
                    connection, _ = self._listener.accept()
                    with connection, suppress(OSError):
                        connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
                        connection.send(self._token_line)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- use and release

    def share(self, now: float) -> None:
        """Allow the workers to bind the reserved ports, and begin to watch rank 0's port."""
        self._close_listener()
        if self._port is not None:
            self._port.share()
            self._port_use = PortUse(self._port.number, now)
        self._share_worker_ports()

    def deadline(self) -> float | None:
        """Return when ``tick`` is due; None if it is not."""
        return None if self._port_use is None else self._port_use.deadline()

    def tick(self, now: float) -> None:
        """Check whether rank 0's port is in use, if a check is due."""
        if self._port_use is not None:
            self._port_use.tick(now)

    def was_port_used(self) -> bool | None:
        """Return whether the workers have used rank 0's port; None if none was reserved on this
        node."""
        return None if self._port_use is None else self._port_use.finish()

    def _share_worker_ports(self) -> None:
        for port in self._worker_ports:
            port.share()

    def serve_store(self, address: str) -> None:
        """Serve Horovod's store on the reserved port, if this node has it. Raises OSError.

        ``address`` is the workers' master address. If it is loopback, only local clients are
        served.
        """
        from distlaunch.core.agent.node.horovod_store import HorovodStore, is_loopback

        self._close_listener()
        self._share_worker_ports()
        if self._port is None:
            return
        listener = self._port.listener()
        try:
            store = HorovodStore(
                listener, loopback_only=is_loopback(address), failed=self._store_failed
            )
            store.start()
        except RuntimeError as exc:
            raise OSError(errno.EAGAIN, "no thread can be started") from exc
        self._store = store

    def _store_failed(self, why: str) -> None:
        self._post(m.AgentFailed(text=f"the store of the workers has failed\n{why}"))

    def release(self) -> None:
        """Release all ports, and end the store."""
        self._port_use = None
        self._close_listener()
        while self._worker_ports:
            self._worker_ports.pop().release()
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._port is not None:
            self._port.release()
            self._port = None
