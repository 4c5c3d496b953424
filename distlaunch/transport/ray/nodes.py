"""Agents on the nodes of a Ray cluster, through a driver process beside the launcher."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distlaunch.core.errors import ConfigError, NodesError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import ended_how, printable
from distlaunch.core.protocol.agent_messages import GREETING
from distlaunch.transport.bootstrap import FLAGS, STUB, agent_zip, clause_of_last_lines
from distlaunch.transport.child_process import Child
from distlaunch.transport.connect_errors import ConnectFailure, ConnectStepError
from distlaunch.transport.connection import (
    ConnectError,
    Connection,
    ConnectionEnd,
    EndKind,
    Target,
    describe_end,
    end_from_json,
)
from distlaunch.transport.ray import local_cluster
from distlaunch.transport.ray.capacity import strip_log_prefixes
from distlaunch.transport.tcp_connection import TcpConnection

_DRIVER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from "
    "distlaunch.transport.ray.driver import main; main()"
)
_AGAIN = "start the job again: without the driver the cluster cannot be used"
_QUIET_S = 5.0
"""How long Ray may take to reserve bundles before the user gets a notice."""
_CONNECT_S = 90.0
"""Time to import Ray and to connect on a busy machine. Ray's client (``ray://``) gives up after 30
s; other connections are tried for minutes."""
_START_S = 120.0
"""Time to start Ray on a busy machine."""
_LATER_S = 5.0
_END_S = 15.0
_TERM_S = 2.0
_SEND_S = 30.0
"""How long the driver may take to read a request."""
_CHUNK = 1 << 16


class RayNode(Record):
    """The bundles that Ray has reserved on one node."""

    host: str
    """The node's name, with the beginning of its id if several nodes have the same."""
    node: str
    bundles: int


class RayCluster:
    """The job's share of a Ray cluster, until ``close``.

    ``place_bundles`` and ``close`` must be called by one thread, all other methods by any.
    """

    def __init__(self, environ: Mapping[str, str], driver: str = _DRIVER) -> None:
        """Start the driver, a Python program, with this environment. Raises ConfigError."""
        self._code = agent_zip()
        self._lock = threading.Lock()
        self._calls = itertools.count()
        self._pending_calls: dict[int, _Call] = {}
        self.note: Callable[[str], None] = _ignore_line

        self._places: dict[str, int] = {}
        self._nodes: dict[str, str] = {}
        self._folder = ""
        self._group = 0

        self._end: ConnectionEnd | None = None

        self._ended = threading.Event()
        words = [
            sys.executable,
            "-I",
            "-c",
            driver,
            json.dumps(_driver_sys_path()),
        ]
        try:
            self._child = Child(words, environ=environ, kill_switch=None)
        except OSError as exc:
            raise ConfigError(
                f"{Opt.BACKEND} ray: {printable(sys.executable)} cannot be run: {exc.strerror}"
            ) from exc
        self._child.stream.settimeout(_SEND_S)
        self._thread = threading.Thread(target=self._read, name="ray", daemon=True)
        self._thread.start()

    def place_bundles(
        self,
        address: str,
        bundles: Sequence[Mapping[str, float]] | None,
        *,
        each: Mapping[str, float],
        strategy: str,
        within_s: float,
        say: Callable[[str], None],
        when_connected: Callable[[], None] = lambda: None,
    ) -> list[RayNode]:
        """Reserve all bundles, or if ``bundles`` is None one like ``each`` for every GPU. Return
        their nodes.

        ``when_connected`` is called once the driver is connected, or has failed to be; ``say`` with
        a notice if reserving takes long. Raises ConfigError for a cluster that cannot be used, and
        NodesError if it cannot reserve the bundles within ``within_s`` seconds.
        """
        code = base64.b64encode(self._code).decode()
        request = {
            "do": "place",
            "address": address,
            "bundles": bundles,
            "each": each,
            "strategy": strategy,
        }
        call, pending = self._request(
            {**request, "within_s": within_s, "quiet_s": _QUIET_S, "code": code}, None
        )
        pending.say = say
        connected = pending.connected.wait(_START_S if address == "local" else _CONNECT_S)
        when_connected()
        reply = pending.wait(within_s + _LATER_S if connected else 0.0)
        with self._lock:
            self._pending_calls.pop(call, None)
        if reply is None:
            text = (
                f"{Opt.BACKEND} ray: the cluster does not answer "
                f"({Opt.ADDRESS(printable(address))})"
            )
            raise NodesError(
                text,
                hint=f"ray status shows whether it runs; {Opt.ADDRESS('HOST:PORT')} is for another",
            )
        if "problem" in reply:
            kind = (
                NodesError
                if reply["passing"] or (pending.reached and "ended" in reply)
                else ConfigError
            )
            raise kind(f"{Opt.BACKEND} ray: {printable(reply['problem'])}", hint=reply["hint"])
        names = Counter(place["host"] for place in reply["places"])
        places = [
            RayNode(
                host=host if names[host := place["host"]] == 1 else f"{host}-{place['node'][:6]}",
                node=place["node"],
                bundles=place["bundles"],
            )
            for place in reply["places"]
        ]
        self._places = {place.host: number for number, place in enumerate(places)}
        self._nodes = {place.host: place.node for place in places}
        return places

    def open(self, target: Target, within_s: float) -> Connection:
        """Start the agent of a node within ``within_s`` seconds, and return the connection to it.

        A notice says if Ray has replaced the node. Raises ConnectError.
        """
        nonce = os.urandom(16).hex()
        ours, theirs = socket.socketpair()
        request = {
            "do": "open",
            "place": self._places[target.host],
            "within_s": within_s,
            "words": [*FLAGS, "-c", STUB, str(len(self._code)), nonce],
            "greeting": f"{GREETING.decode()}{nonce}\n",
        }
        call, pending = self._request(request, theirs)
        reply = pending.wait(within_s + _LATER_S)
        if reply is not None and "opened" in reply:
            if reply["opened"] != self._nodes[target.host]:
                self._nodes[target.host] = reply["opened"]
                self.note(
                    f"Ray has replaced the node {printable(target.host)} by "
                    f"{printable(reply['address'])}"
                )
            return _RayConnection(ours, target.host, pending)
        ours.close()
        with self._lock:
            self._pending_calls.pop(call, None)
        pending.set_end(None)
        if reply is None:
            reply = {
                "problem": "Ray did not start the agent in time",
                "hint": None,
                "passing": True,
            }
        raise ConnectError(_failure_from_reply(reply, target.host))

    def driver_end(self) -> ConnectionEnd | None:
        """Return how the driver ended, and with it the job's share of the cluster; None while it
        runs."""
        return self._end

    def cancel(self) -> None:
        """Fail all requests that wait for a reply now."""
        with self._lock:
            calls = list(self._pending_calls.values())
        for pending in calls:
            pending.set_reply({"problem": "the job is over", "hint": None, "passing": False})

    def close(self) -> None:
        """Return everything to Ray, and wait for that within a limit."""
        with suppress(OSError):
            self._child.stream.shutdown(socket.SHUT_WR)
        if self._child.returncode(_END_S) is None:
            self._child.stop(_TERM_S)
        with suppress(OSError):
            self._child.stream.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._child.close()
        self._child.stream.close()
        if self._folder:
            local_cluster.end_cluster(self._folder, self._group)

    # --- the driver

    def _request(
        self, request: dict[str, Any], connection: socket.socket | None
    ) -> tuple[int, _Call]:
        """Send a request to the driver, with the socket of a connection if one is passed. Return
        its number and the reply that will come.

        If the driver is gone, the reply is an error.
        """
        pending = _Call(connection)
        with self._lock:
            call = next(self._calls)
            self._pending_calls[call] = pending
            data = json.dumps({**request, "call": call}).encode() + b"\n"
            try:
                if connection is not None:
                    sent = socket.send_fds(self._child.stream, [data], [connection.fileno()])
                    data = data[sent:]
                self._child.stream.sendall(data)
                is_gone = False
            except OSError:  # the driver has ended or hangs
                is_gone = True
        if is_gone:
            self._ended.wait(_TERM_S + _LATER_S)
            pending.set_reply(self._driver_gone())
        return call, pending

    def _driver_gone(self) -> dict[str, Any]:
        end = self._end or ConnectionEnd(kind=EndKind.RAY_DRIVER, text="does not read its requests")
        return {"problem": describe_end(end), "hint": _AGAIN, "passing": False, "ended": end}

    def _read(self) -> None:
        """Read the driver's replies to their end. Pending requests then get an error."""
        try:
            self._read_all()
        finally:
            code = self._child.returncode(_TERM_S)
            how = "has closed its output" if code is None else ended_how(code)
            with self._lock:
                words = clause_of_last_lines(strip_log_prefixes(self._child.read_stderr()))
                self._end = ConnectionEnd(kind=EndKind.RAY_DRIVER, text=how, last_words=words)
                calls = list(self._pending_calls.values())
            self._ended.set()
            for pending in calls:
                pending.set_reply(self._driver_gone())

    def _read_all(self) -> None:
        pending = b""
        stream = self._child.stream
        while True:
            poll = select.poll()
            for descriptor in (stream.fileno(), self._child.stderr_fd):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll()]
            self._child.read_stderr()
            if stream.fileno() not in ready:
                continue
            try:
                data = stream.recv(_CHUNK)
            except OSError:
                data = b""
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._on_reply(json.loads(line))

    def _on_reply(self, reply: dict[str, Any]) -> None:
        with self._lock:
            pending = self._pending_calls.get(reply["call"])
        if pending is None:
            return
        if "folder" in reply:
            self._folder, self._group = reply["folder"], reply["group"]
        elif "connected" in reply:
            pending.reached = True
            pending.connected.set()
        elif "waiting" in reply:
            pending.say(printable(reply["waiting"]))
        elif "ended" in reply:
            pending.set_end(end_from_json(reply["ended"]))
            with self._lock:
                self._pending_calls.pop(reply["call"], None)
        elif "problem" in reply and pending.has_reply:
            pending.set_reply(reply)
            with self._lock:
                self._pending_calls.pop(reply["call"], None)
        else:
            pending.set_reply(reply)


def _failure_from_reply(reply: Mapping[str, Any], host: str) -> ConnectFailure:
    return ConnectStepError(
        "ray", printable(reply["problem"]), hint=reply["hint"], passing=reply["passing"]
    ).failure(host)


class _Call:
    """One request to the driver, and its reply.

    ``connection`` is the end of the connection that was passed to the driver. A copy stays open
    here until the end of the agent or the driver is known, for the report.
    """

    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection
        self._ending = threading.Lock()
        self.say: Callable[[str], None] = _ignore_line
        self.connected = threading.Event()

        self.reached = False
        self._reply: dict[str, Any] | None = None
        self._has_reply = threading.Event()
        self.end: ConnectionEnd | None = None

    @property
    def has_reply(self) -> bool:
        return self._has_reply.is_set()

    def wait(self, within_s: float) -> dict[str, Any] | None:
        """Return the reply; None if none arrives within ``within_s`` seconds."""
        self._has_reply.wait(within_s)
        return self._reply

    def set_reply(self, reply: dict[str, Any]) -> None:
        """Set the reply. A problem after the first reply is how the agent ended."""
        if not self._has_reply.is_set():
            self._reply = reply
            self._has_reply.set()
            self.connected.set()
        elif "problem" in reply:
            text = printable(reply["problem"])
            self.set_end(reply.get("ended") or ConnectionEnd(kind=EndKind.CARRIER, text=text))

    def set_end(self, end: ConnectionEnd | None) -> None:
        """Set how the agent ended, unless that is known, and close the connection."""
        with self._ending:
            self.end = self.end or end
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)
                self._connection.close()
                self._connection = None


class _RayConnection(TcpConnection):
    """A connection whose other end is the driver."""

    def __init__(self, connection: socket.socket, host: str, pending: _Call) -> None:
        super().__init__(connection, host)
        self._answer = pending

    def end(self) -> ConnectionEnd:
        return self._answer.end or super().end()


def _driver_sys_path() -> list[str]:
    """Return ``sys.path`` for the driver. The working directory, which ``python -m`` puts first,
    comes last."""
    here = os.getcwd()
    return sorted(sys.path, key=lambda each: each in {"", here})


def _ignore_line(_: str) -> None: ...
