"""Launchers of one job on this machine, which meet on loopback: what tests of several launchers
start and ask."""

from __future__ import annotations

import json
import random
import socket
from contextlib import ExitStack

from tests.ports import free_port
from tests.process.conftest import PROGRAMS, until

LONG_S = 60.0


class Team:
    """Launchers of one job. Their workers are ``member.py``, which go by signs in the common
    directory."""

    def __init__(self, launcher) -> None:
        self.launcher = launcher
        self.port = free_port()
        self.launchers = {}

    def start(
        self,
        rank: int | None,
        *words: str,
        size: int | str = 2,
        slots: int = 1,
        program: str = "member.py",
        env=None,
        job=None,
    ):
        named = [] if rank is None else ["--node-rank", str(rank)]
        place = ["--rendezvous", f"127.0.0.1:{self.port}", "--num-nodes", str(size), *named]
        args = [
            "train",
            *place,
            "--procs-per-node",
            str(slots),
            "--format",
            "plain",
            *words,
            str(PROGRAMS / program),
        ]
        running = self.launcher.start([*args, *(job or ())], env=env)
        self.launchers[rank] = running
        return running

    def start_all(self, *words: str, size: int = 2, **more) -> list:
        """Start all of them, in any order."""
        ranks = list(range(size))
        random.Random(self.port).shuffle(ranks)
        for rank in ranks:
            self.start(rank, *words, size=size, **more)
        return [self.launchers[rank] for rank in range(size)]

    def wait_for_calls(self, count: int) -> None:
        """Wait until so many launchers call node 0, which has not been started, and hang up."""
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", self.port)))
            listener.settimeout(LONG_S)
            for _ in range(count):
                stack.enter_context(listener.accept()[0])  # kept meanwhile: nobody calls twice

    def ready(self, *ranks: int, attempt: int = 0) -> list[dict]:
        """Wait for workers, and give what they were told."""
        paths = [self.launcher.work / f"ready-{attempt}-{rank}" for rank in ranks]

        def there() -> bool:
            ended = {
                rank: each.process.returncode
                for rank, each in self.launchers.items()
                if each.process.poll() is not None
            }
            screens = {rank: self.launchers[rank].stderr for rank in ended}
            assert not any(code for code in ended.values() if code > 0), screens
            return all(path.exists() for path in paths)

        until(there, f"workers {ranks} of attempt {attempt}", within_s=LONG_S)
        return [json.loads(path.read_text()) for path in paths]

    def put(self, sign: str) -> None:
        (self.launcher.work / sign).touch()

    def codes(self, within_s: float = LONG_S) -> dict:
        return {rank: each.wait(within_s).returncode for rank, each in self.launchers.items()}

    def said(self, rank) -> str:
        return self.launchers[rank].stderr
