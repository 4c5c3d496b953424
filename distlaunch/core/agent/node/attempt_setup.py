"""What must be settled on a node before an attempt's workers start.

On GPUs the memory of the last attempt has to be given back; the master's node holds a port for rank
0, and lets other nodes try whether they get through to it. Where workers listen themselves, each
node holds their ports as well.
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

    from distlaunch.core.agent.node.horovod_store import Store

GPU_RELEASE_S = 30.0
"""How long the driver may take to give back the memory of processes that have ended."""
_ACCEPTED_AT_ONCE = 256
"""So many connections are answered before the loop goes on."""


class GpusFree(Record):
    """The wait before an attempt is over; ``holders`` still had memory."""

    prepare: m.Prepare
    holders: tuple[int, ...]


class AttemptSetup:
    """Answers ``Prepare``, and has the port until it is released."""

    def __init__(
        self,
        *,
        port: HeldPort | None,
        send: Callable[[m.FromAgent], None],
        post: Callable[[GpusFree | m.AgentFailed], None],
    ) -> None:
        """``port``: for the first attempt it may be held already. ``post`` is called from another
        thread."""
        self._port = port
        self._further: list[HeldPort] = []
        self._send = send
        self._post = post
        self._listener: socket.socket | None = None
        self._store: Store | None = None
        self._use: PortUse | None = None
        """Of rank 0's port, while the workers of an attempt run."""
        self._word = b""
        self._newest: m.Prepare | None = None
        """Others are of attempts that came to nothing: a wait for their sake may end later."""

    def prepare(self, message: m.Prepare, *, owner: str, pids: Collection[int]) -> None:
        """Settle it; first wait (in a thread) until the driver has taken back the memory of these
        ended processes."""
        self._newest = message
        if not pids:
            self._hold(message, owner, warning=None)
            return
        from distlaunch.core.probe.nvidia import await_release

        ended = frozenset(pids)

        def wait() -> None:
            holders = await_release(ended, bound_s=GPU_RELEASE_S, environ=os.environ)
            self._post(GpusFree(prepare=message, holders=holders))

        try:
            threading.Thread(target=wait, name="gpu memory", daemon=True).start()
        except RuntimeError:  # the limit of processes: then without the wait
            self._hold(message, owner, warning="no thread can wait for the memory of the GPUs")

    def gpus_free(self, event: GpusFree, *, owner: str) -> None:
        """Go on after the wait."""
        if event.prepare is not self._newest:
            return
        held = ", ".join(map(str, event.holders))
        self._hold(
            event.prepare,
            owner,
            warning=f"GPU memory is still held by ended pid {held}" if held else None,
        )

    def _hold(self, message: m.Prepare, owner: str, *, warning: str | None) -> None:
        if (
            message.attempt > 0
            or message.port is None
            or (self._port and message.port not in (0, self._port.number))
        ):
            self.release()
        problem = hint = None
        try:
            if message.port is not None and self._port is None:
                self._port = hold_port(message.port, owner=owner)
            while len(self._further) < message.ports:
                self._further.append(hold_port(0, owner=owner))
            if self._port is not None and message.token:
                self._listen(self._port, message.token)
        except ConfigError as exc:
            problem, hint = exc.message, exc.hint
        number = self._port.number if self._port and not problem else None
        further = () if problem else tuple(port.number for port in self._further)
        self._send(
            m.Prepared(
                attempt=message.attempt,
                port=number,
                problem=problem,
                hint=hint,
                warning=warning,
                ports=further,
            )
        )

    # --- for other nodes to try

    def _listen(self, port: HeldPort, token: str) -> None:
        self._close_listener()
        self._word = token.encode() + b"\n"
        try:
            self._listener = port.listener()
        except OSError as exc:
            raise ConfigError(
                f"nobody can listen on port {port.number}: {os.strerror(exc.errno or 0)}"
            ) from exc

    def descriptors(self) -> dict[int, int]:
        """Return what to poll, with the events."""
        return {} if self._listener is None else {self._listener.fileno(): select.POLLIN}

    def on_ready(self) -> None:
        """Say the word to whoever has connected."""
        if self._listener is None:
            return
        with suppress(BlockingIOError):
            for _ in range(_ACCEPTED_AT_ONCE):
                with suppress(ConnectionError):
                    connection, _ = self._listener.accept()
                    with connection, suppress(OSError):
                        connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
                        connection.send(self._word)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- the end

    def share(self, now: float) -> None:
        """Let rank 0 have the port from now on, and whoever they are for the further ones."""
        self._close_listener()
        if self._port is not None:
            self._port.share()
            self._use = PortUse(self._port.number, now)
        self._share_further()

    def deadline(self) -> float | None:
        """Return when ``tick`` is due."""
        return None if self._use is None else self._use.deadline()

    def tick(self, now: float) -> None:
        """Look whether rank 0's port is used."""
        if self._use is not None:
            self._use.tick(now)

    def was_port_used(self) -> bool | None:
        """Return whether the ended workers have used rank 0's port; None if it was not theirs, or
        not held here."""
        return None if self._use is None else self._use.finish()

    def _share_further(self) -> None:
        for port in self._further:
            port.share()

    def serve_store(self, address: str) -> None:
        """Serve a store on the port from now on, instead; ``address`` is what workers are told.
        Raises OSError."""
        from distlaunch.core.agent.node.horovod_store import Store, is_here

        self._close_listener()
        self._share_further()
        if self._port is None:
            return
        listener = self._port.listener()
        try:
            store = Store(listener, only_here=is_here(address), failed=self._store_failed)
            store.start()
        except RuntimeError as exc:
            raise OSError(errno.EAGAIN, "no thread can be started") from exc
        self._store = store

    def _store_failed(self, why: str) -> None:
        self._post(m.AgentFailed(text=f"the store of the workers has failed\n{why}"))

    def release(self) -> None:
        """Give all ports back."""
        self._use = None
        self._close_listener()
        while self._further:
            self._further.pop().release()
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._port is not None:
            self._port.release()
            self._port = None
