"""Ray's driver, as a process of its own. It reserves bundles and carries bytes to agents.

The driver is not part of the launcher, because Ray handles signals and starts threads in its
process, and ends it when the cluster is lost.

The driver's stdin is a socket to the launcher, for requests and replies as lines of JSON. For each
connection to an agent the launcher makes a pair of sockets, and passes one with the request. The
driver's own messages go to stderr. When its stdin ends, the driver returns everything to Ray within
a time limit, and exits.

A bundle is a set of resources that Ray reserves on one node. A place is all bundles on one node.
The actor in its first bundle starts the agent as its child process, and carries the agent's bytes
in its calls. The actor in each other bundle with GPUs reports these GPUs.

So the launcher opens no connection to a node, and no node opens one to the launcher. The launcher
only has to reach the cluster (``ray://``).
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from distlaunch.transport.connection import ConnectionEnd, EndKind, end_of_program, end_to_json
from distlaunch.transport.open_files import raise_limit
from distlaunch.transport.ray import actor, local_cluster
from distlaunch.transport.ray.capacity import (
    Bundle,
    RayError,
    bundle_for_each_gpu,
    bundles_without_room,
    describe_shortage,
    error_line,
)

_CHUNK = 1 << 20
_TURN_S = 20.0
"""How long one call of an actor waits for the agent's bytes."""
_ANSWER_S = 30.0
"""How much longer than its own time limit an actor may take to answer before Ray counts as
broken."""
_LOOK_S = 0.5
_AGENT_ENDS_S = 20.0
"""Its workers have their grace, then they are killed."""
_STOPS_S = _AGENT_ENDS_S + 5.0
_START_S = 5.0
"""How much longer than its own time limit the start of an actor may take."""
_END_S = 10.0
_REACHED_S = 5.0
_FILES, _FILES_EACH = 1024, 4
_CLIENT = "ray://"
_LAST_S = 3.0

_HINT = (
    "use --address HOST:PORT or ray://HOST:10001 for a cluster, --address local to start Ray here"
)


class RayDriver:
    """Serves the launcher's requests."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._sending = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._group: Any = None
        self._places: list[list[int]] = []
        self._bundles: Sequence[Bundle] = ()
        self._code: Any = None
        self._folder: str | None = None
        self._held = -1
        self._actors_of_place: dict[int, tuple[threading.Event, list[Any]]] = {}
        self._over = threading.Event()
        self._is_connected = False
        self._started, self._has_started = os.pipe()

    def serve(self) -> None:
        """Serve requests until stdin ends, then return everything to Ray and exit the process."""
        pending, descriptors = b"", []
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._started, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._started in ready:
                os.read(self._started, 1)
                _ignore_signals()
            if self._control.fileno() not in ready:
                continue
            data, more, _, _ = socket.recv_fds(self._control, 1 << 16, 16)
            descriptors += more
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if (
                    request["do"] == "open" and not descriptors
                ):  # recv_fds had no room for all descriptors
                    problem = "Ray's driver has no descriptor left for it (ulimit -n)"
                    self._reply(call=request["call"], problem=problem, hint=None, passing=True)
                    continue
                connection = (
                    socket.socket(fileno=descriptors.pop(0)) if request["do"] == "open" else None
                )
                thread = threading.Thread(
                    target=self._answer, args=(request, connection), daemon=True
                )
                if connection is not None:
                    self._threads.append(thread)
                thread.start()
        self._over.set()
        self._shut_down()

    def _reply(self, **fields: object) -> None:
        with self._sending, suppress(OSError):  # the launcher has ended; the loop will see that
            self._control.sendall(json.dumps(fields).encode() + b"\n")

    def _answer(self, request: dict[str, Any], connection: socket.socket | None) -> None:
        """Carry out a request in its own thread, and reply with the result or the error."""
        call = request["call"]
        try:
            if connection is None:
                self._reply(call=call, places=self._place(request))
            else:
                self._open(request, connection)
        except RayError as problem:
            self._reply(call=call, problem=str(problem), hint=problem.hint, passing=problem.passing)
        except Exception as exc:  # noqa: BLE001 - Ray's are many, and the launcher has to know
            passing = not isinstance(
                exc, (ValueError, TypeError)
            )  # Ray's errors for invalid requests
            self._reply(call=call, problem=error_line(exc), hint=None, passing=passing)
        finally:
            if connection is not None:
                connection.close()
        if connection is None:
            # When the thread that started Ray ends, the kernel kills Ray's processes.
            threading.Event().wait()

    # --- placing

    def _place(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Connect to the cluster and reserve all bundles. Return the places in the order of their
        first bundles.

        Raises RayError.
        """
        import ray
        from ray.util.placement_group import placement_group

        self._connect(request)
        os.write(self._has_started, b"x")
        self._is_connected = True
        self._reply(call=request["call"], connected=True)
        ray.cloudpickle.register_pickle_by_value(actor)  # nodes need not have distlaunch
        self._bundles = request["bundles"] or bundle_for_each_gpu(
            list(self._live_nodes().values()), request["each"]
        )
        raise_limit(_FILES + _FILES_EACH * len(self._bundles))
        if request["address"] == "local" and bundles_without_room(
            self._bundles, request["strategy"], list(self._live_nodes().values())
        ):
            raise RayError(
                self._describe_shortage(request["strategy"])
            )  # a local cluster never grows
        self._code = ray.put(base64.b64decode(request["code"]))
        self._group = placement_group(self._bundles, strategy=request["strategy"])
        until = time.monotonic() + request["within_s"]
        notice_at = time.monotonic() + request["quiet_s"]
        while not self._group.wait(_LOOK_S):
            now = time.monotonic()
            if self._over.is_set():
                raise RayError("the job is over")
            if now > until:
                raise RayError(
                    f"within {request['within_s']:g} s {self._describe_shortage(request['strategy'])}"
                )
            if notice_at is not None and now > notice_at:
                notice_at = None
                self._reply(
                    call=request["call"], waiting=self._describe_shortage(request["strategy"])
                )
        nodes = self._live_nodes()
        by_node: dict[str, list[int]] = {}
        for bundle, node in sorted(self._nodes_of_bundles().items()):
            by_node.setdefault(node, []).append(bundle)
        self._places = list(by_node.values())
        return [
            {
                "node": node,
                "host": nodes[node]["NodeManagerHostname"],
                "address": nodes[node]["NodeManagerAddress"],
                "bundles": len(bundles),
            }
            for node, bundles in by_node.items()
        ]

    def _connect(self, request: dict[str, Any]) -> None:
        """Connect to the cluster of ``address``, or start one here for ``local``. Raise
        RayError."""
        import ray

        address = request["address"]
        host, colon, port = address.removeprefix(_CLIENT).rpartition(":")
        if colon and "/" not in host:
            _check_reachable(host.strip("[]"), port)
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if address != "local":
                ray.init(address, **quiet)
                return
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            self._folder, self._held = local_cluster.make_folder(os.environ.get("RAY_TMPDIR"))
            self._reply(call=request["call"], folder=self._folder, group=os.getpgrp())
            total: dict[str, float] = {}
            for bundle in request["bundles"] or ():
                for name, amount in bundle.items():
                    total[name] = total.get(name, 0) + amount
            whole = {name: math.ceil(amount) for name, amount in total.items() if name != "GPU"}
            cpus = max(os.cpu_count() or 1, whole.pop("CPU", 0))
            given = {"num_cpus": cpus, "_memory": whole.pop("memory", None), "resources": whole}
            ray.init("local", **given, include_dashboard=False, _temp_dir=self._folder, **quiet)
        except ConnectionError as exc:
            text = (
                "no running Ray cluster was found (--address auto)"
                if address == "auto"
                else error_line(exc)
            )
            raise RayError(text, hint=_HINT, passing=False) from exc
        except (RuntimeError, ValueError) as exc:
            raise RayError(error_line(exc), passing=False) from exc

    def _describe_shortage(self, strategy: str) -> str:
        import ray

        return describe_shortage(
            self._bundles, strategy, list(self._live_nodes().values()), ray.available_resources()
        )

    def _live_nodes(self) -> dict[str, dict[str, Any]]:
        import ray

        return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}

    def _nodes_of_bundles(self) -> dict[int, str]:
        from ray.util.placement_group import placement_group_table

        return {
            int(bundle): node
            for bundle, node in placement_group_table(self._group)["bundles_to_node_id"].items()
        }

    # --- links

    def _open(self, request: dict[str, Any], connection: socket.socket) -> None:
        """Start the agent of a place, report the start, and carry bytes until the agent ends.
        Raises RayError."""
        until = time.monotonic() + request["within_s"]
        bundles = self._places[request["place"]]
        self._release_place(request["place"], request["within_s"])
        node = self._wait_for_node(bundles, until)
        actors = self._start_actors(bundles)
        left = threading.Event()
        self._actors_of_place[request["place"]] = left, actors
        try:
            mask = self._device_mask(actors, until)
            words, greeting = request["words"], request["greeting"].encode()
            left_s = max(1.0, until - time.monotonic())
            started = actors[0].start.remote(words, self._code, greeting, mask, left_s)
            problem = self._await_result(started, left_s + _START_S)
            if problem is not None:
                raise RayError(problem)
            self._reply(
                call=request["call"], opened=node["NodeID"], address=node["NodeManagerAddress"]
            )
            self._carry(request["call"], actors[0], connection)
        finally:
            _kill_actors(actors)
            left.set()

    def _release_place(self, place: int, within_s: float) -> None:
        """Kill the actors of a place's previous connection, which may hang and block the
        bundles."""
        left, actors = self._actors_of_place.get(place, (None, []))
        if left is not None and not left.wait(min(_AGENT_ENDS_S, within_s / 4)):
            _kill_actors(actors)

    def _wait_for_node(self, bundles: list[int], until: float) -> dict[str, Any]:
        """Return the node of a place's bundles. If it is lost, wait while Ray reserves the bundles
        elsewhere.

        Raises RayError.
        """
        while True:
            alive, placed = self._live_nodes(), self._nodes_of_bundles()
            nodes = {placed.get(bundle, "") for bundle in bundles}
            if nodes <= alive.keys():
                break
            if self._over.is_set() or time.monotonic() > until:
                raise RayError("its node is lost, and Ray found no other node for its workers")
            time.sleep(_LOOK_S)
        if len(nodes) > 1:
            names = ", ".join(sorted(alive[node]["NodeManagerAddress"] for node in nodes))
            text = (
                f"its node is lost, and Ray put its workers on {len(nodes)} other nodes ({names})"
            )
            raise RayError(text, hint="start the job again", passing=False)
        return alive[nodes.pop()]

    def _start_actors(self, bundles: list[int]) -> list[Any]:
        """Start the first bundle's actor, and one for each other bundle with GPUs. Return their
        handles."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        made: list[Any] = []
        for bundle in bundles:
            wanted = dict(self._bundles[bundle])
            if made and not wanted.get("GPU"):
                continue
            options = {
                "num_cpus": wanted.pop("CPU", 0),
                "num_gpus": wanted.pop("GPU", 0),
                "memory": int(wanted.pop("memory", 0)) or None,
                "resources": wanted,
                "max_concurrency": 8,
                "max_restarts": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle),
            }
            made.append(ray.remote(**options)(actor.AgentActor).remote())
        return made

    def _device_mask(self, actors: list[Any], until: float) -> list[str]:
        """Return the ids of a place's GPUs, from all its actors. Raises RayError."""
        reply = self._await_result(
            [handle.devices.remote() for handle in actors], max(1.0, until - time.monotonic())
        )
        if len({node for node, _ in reply}) > 1:
            raise RayError("Ray has started its actors on several nodes")
        return [device for _, devices in reply for device in devices]

    def _await_result(self, request: Any, within_s: float) -> Any:
        """Return the result of a call of an actor. Raise RayError if it takes longer than
        ``within_s``."""
        import ray

        try:
            return ray.get(request, timeout=within_s)
        except ray.exceptions.GetTimeoutError as exc:
            raise RayError("Ray's actor there does not answer") from exc

    def _carry(self, call: int, handle: Any, connection: socket.socket) -> None:
        """Carry bytes between an agent and the launcher until the agent ends, and report the
        end."""
        up = threading.Thread(target=self._send_to_agent, args=(handle, connection), daemon=True)
        up.start()
        try:
            end = self._receive_from_agent(handle, connection)
        except Exception as exc:  # noqa: BLE001 - Ray's are many
            end = ConnectionEnd(kind=EndKind.RAY_ACTOR, text=error_line(exc))
        self._reply(call=call, ended=end_to_json(end))
        with suppress(OSError):
            connection.shutdown(
                socket.SHUT_RD
            )  # ends ``up``; the launcher closes its end after it has read the reply
        up.join(_STOPS_S)

    def _send_to_agent(self, handle: Any, connection: socket.socket) -> None:
        """Carry the launcher's bytes to the agent. When the launcher closes the connection, stop
        the agent, then kill its actor."""
        with suppress(Exception):  # ``_receive_from_agent`` reports it
            while data := connection.recv(_CHUNK):
                self._await_result(handle.write.remote(data), _ANSWER_S)
        with suppress(Exception):  # the launcher has closed the connection
            self._await_result(handle.stop.remote(_AGENT_ENDS_S), _STOPS_S)
        _kill_actors([handle])  # also one that hangs, so that calls of it return

    def _receive_from_agent(self, handle: Any, connection: socket.socket) -> ConnectionEnd:
        """Carry the agent's bytes to the launcher. Return how the agent ended."""
        coming = handle.read.remote(_CHUNK, _TURN_S)
        while (data := self._await_result(coming, _TURN_S + _ANSWER_S)) is not None:
            coming = handle.read.remote(_CHUNK, _TURN_S)
            try:
                connection.sendall(data)
            except OSError:  # the launcher has closed the connection
                return ConnectionEnd(kind=EndKind.CLOSED_HERE)
        code, line = self._await_result(handle.end.remote(), _ANSWER_S)
        return end_of_program(code, f": {line}" if line else "")

    # --- the end

    def _shut_down(self) -> None:
        """Return everything to Ray within a time limit, and exit the process."""
        threading.Timer(_END_S, self._end).start()  # even if Ray hangs
        until = time.monotonic() + _LAST_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._is_connected:  # otherwise Ray may still wait for the cluster
            import ray
            from ray.util.placement_group import remove_placement_group

            with suppress(
                Exception
            ):  # the cluster may be gone; otherwise Ray cleans up after a dead driver
                if self._group is not None:
                    remove_placement_group(self._group)
                ray.shutdown()
        self._end()

    def _end(self) -> None:
        """Remove a local cluster, and exit the process at once."""
        if self._folder is not None:
            local_cluster.end_cluster(self._folder, os.getpgrp())
        os._exit(0)


def _check_reachable(host: str, port: str) -> None:
    """Raise RayError if a cluster's address accepts no connection. Ray would try for minutes."""
    try:
        socket.create_connection((host, int(port)), _REACHED_S).close()
    except ValueError as exc:
        raise RayError(f"--address {host}:{port}: not a port", hint=_HINT, passing=False) from exc
    except OSError as exc:
        raise RayError(
            f"cannot connect to {host}:{port}: {exc.strerror or exc}", hint=_HINT, passing=False
        ) from exc


def _kill_actors(actors: list[Any]) -> None:
    import ray

    for handle in actors:
        with suppress(Exception):
            ray.kill(handle)


def _ignore_signals() -> None:
    """Ignore signals, since the launcher decides when the driver ends.

    Called in the main thread, and again after ``ray.init``, which installs a handler for TERM.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # SIG_IGN would be inherited by Ray's processes


def main() -> None:
    """Serve the launcher, whose socket is stdin. Does not return."""
    _ignore_signals()
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    RayDriver(control).serve()
