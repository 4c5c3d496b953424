"""A client of the debug adapter protocol, like an editor: it follows child processes and collects
stops."""

from __future__ import annotations

import itertools
import json
import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Any


class Session:
    """One connection: to the debugged launcher, or to a worker that it has announced."""

    def __init__(self, client: Client, address: tuple[str, int], attach: dict[str, Any]) -> None:
        self._client = client
        self._attach = attach
        self._socket = self._connect(address)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.ask(
            "initialize",
            adapterID="test",
            clientID="test",
            linesStartAt1=True,
            supportsStartDebuggingRequest=False,
        )
        self.tell("attach", **attach)

    @staticmethod
    def _connect(address: tuple[str, int]) -> socket.socket:
        deadline = time.monotonic() + 60
        while True:
            try:
                connected = socket.create_connection(address, timeout=60)
            except ConnectionRefusedError:  # the debugger is not up yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                connected.settimeout(None)
                return connected

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request. Return the body of its answer."""
        answer = self._answers[self.tell(command, **arguments)].get(timeout=60)
        assert answer["success"], answer
        return answer.get("body") or {}

    def tell(self, command: str, **arguments: Any) -> int:
        """Send a request without waiting for its answer. Return its number."""
        with self._sending:
            number = next(self._numbers)
            self._answers[number] = queue.Queue()
            text = json.dumps(
                {"seq": number, "type": "request", "command": command, "arguments": arguments}
            ).encode()
            self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(text), text))
        return number

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(20)
        self._socket.close()

    def _read(self) -> None:
        with (
            suppress(OSError),
            self._socket.makefile("rb") as file,
        ):  # a process that ends may reset it
            while header := file.readline():
                length = int(header.split(b":")[1])
                while file.readline().strip():
                    pass
                message = json.loads(file.read(length))
                if message["type"] == "response":
                    self._answers[message["request_seq"]].put(message)
                elif message["type"] == "event":
                    threading.Thread(
                        target=self._client.on_event, args=(self, message), daemon=True
                    ).start()


class Client:
    """Attaches to a port, sets one breakpoint in each process, and continues each process that
    stops there."""

    def __init__(self, port: int, *, source: str, line: int) -> None:
        self._breakpoint = {"source": {"path": source}, "breakpoints": [{"line": line}]}
        self.announced: list[int] = []
        """The processes that were announced as children to attach to."""
        self.stops: queue.Queue[tuple[str, int, str]] = queue.Queue()
        """File, line and value of ``rank`` wherever a process has stopped."""
        self._sessions: list[Session] = []
        attach = {"type": "debugpy", "request": "attach", "subProcess": True, "justMyCode": True}
        self._sessions.append(Session(self, ("127.0.0.1", port), attach))

    def close(self) -> None:
        """End all connections."""
        for session in self._sessions:
            session.close()

    def on_event(self, session: Session, message: dict[str, Any]) -> None:
        body = message.get("body") or {}
        match message["event"]:
            case "debugpyAttach":
                self.announced.append(body["subProcessId"])
                self._sessions.append(
                    Session(self, (body["connect"]["host"], body["connect"]["port"]), body)
                )
            case "initialized":
                session.ask("setBreakpoints", **self._breakpoint)
                session.ask("configurationDone")
            case "stopped":
                top = session.ask("stackTrace", threadId=body["threadId"])["stackFrames"][0]
                rank = session.ask(
                    "evaluate", expression="rank", frameId=top["id"], context="watch"
                )["result"]
                self.stops.put((top["source"]["path"], top["line"], rank))
                session.tell("continue", threadId=body["threadId"])
