"""Jobs with several launchers on this machine, which connect to each other on loopback."""

from __future__ import annotations

import json
import random
import socket
from contextlib import ExitStack

from tests.ports import free_port
from tests.process.conftest import PROGRAMS, until

LONG_S = 60.0


class LoopbackLaunchers:
    """Launchers of one job by node rank. Their workers run ``waits_for_signs.py`` in the common
    directory."""

    def __init__(self, launcher) -> None:
        self.distlaunch = launcher
        self.port = free_port()
        self.by_rank = {}

    def start(
        self,
        rank: int | None,
        *words: str,
        size: int | str = 2,
        slots: int = 1,
        program: str = "waits_for_signs.py",
        env=None,
        job=None,
    ):
        named = [] if rank is None else ["--node-rank", str(rank)]
        rendezvous = ["--rendezvous", f"127.0.0.1:{self.port}", "--num-nodes", str(size), *named]
        args = [
            "train",
            *rendezvous,
            "--procs-per-node",
            str(slots),
            "--format",
            "plain",
            *words,
            str(PROGRAMS / program),
        ]
        running = self.distlaunch.start([*args, *(job or ())], env=env)
        self.by_rank[rank] = running
        return running

    def start_all(self, *words: str, size: int = 2, **more) -> list:
        """Start all launchers in random order."""
        ranks = list(range(size))
        random.Random(self.port).shuffle(ranks)
        for rank in ranks:
            self.start(rank, *words, size=size, **more)
        return [self.by_rank[rank] for rank in range(size)]

    def wait_for_connections(self, count: int) -> None:
        """Listen in place of node 0, wait until ``count`` launchers have connected, and hang up."""
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", self.port)))
            listener.settimeout(LONG_S)
            for _ in range(count):
                stack.enter_context(listener.accept()[0])  # kept meanwhile: nobody calls twice

    def wait_ready(self, *ranks: int, attempt: int = 0) -> list[dict]:
        """Wait until these workers run. Return what each of them reports."""
        paths = [self.distlaunch.work / f"ready-{attempt}-{rank}" for rank in ranks]

        def there() -> bool:
            ended = {
                rank: each.process.returncode
                for rank, each in self.by_rank.items()
                if each.process.poll() is not None
            }
            screens = {rank: self.by_rank[rank].stderr for rank in ended}
            assert not any(code for code in ended.values() if code > 0), screens
            return all(path.exists() for path in paths)

        until(there, f"workers {ranks} of attempt {attempt}", within_s=LONG_S)
        return [json.loads(path.read_text()) for path in paths]

    def put_sign(self, sign: str) -> None:
        (self.distlaunch.work / sign).touch()

    def exit_codes(self, within_s: float = LONG_S) -> dict:
        return {rank: each.wait(within_s).returncode for rank, each in self.by_rank.items()}

    def stderr_of(self, rank) -> str:
        return self.by_rank[rank].stderr
