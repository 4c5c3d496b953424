"""Jobs with one launcher on each of the test bed's hosts, without SSH. Workers run
``programs/nodes/waits_for_files.py``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Cluster, RunningOnHost, until

PROGRAM = Path(__file__).parents[1] / "programs" / "nodes" / "waits_for_files.py"
PORT = 29400
LONG_S = 90.0
LISTENS = """
import socket, sys
listener = socket.create_server(("", int(sys.argv[1])))
kept = {}
while len(kept) < int(sys.argv[2]):
    connection, address = listener.accept()
    kept[address[0]] = connection
"""


class HostLaunchers:
    """Launchers of one job by node rank. By default rank 0 runs on n1, rank 1 on n2, and so on."""

    def __init__(self, hosts: Cluster) -> None:
        self.hosts = hosts
        self.by_rank: dict[Any, RunningOnHost] = {}

    def start(
        self,
        rank: int,
        *options: str | os.PathLike[str],
        size: int | str = 3,
        host: str | None = None,
        at: str = f"n1:{PORT}",
        slots: int = 1,
        program: str | os.PathLike[str] = PROGRAM,
        words: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> RunningOnHost:
        rendezvous = [
            "--rendezvous",
            at,
            "--num-nodes",
            str(size),
            "--node-rank",
            str(rank),
            "--procs-per-node",
            str(slots),
        ]
        args = [
            "train",
            *rendezvous,
            "--device",
            "cpu",
            "--format",
            "plain",
            *options,
            program,
            *words,
        ]
        running = self.hosts.start(
            args,
            host=host or f"n{rank + 1}",
            env={"SIGN_DIR": str(self.hosts.work), **(env or {})},
            **popen,
        )
        self.by_rank[rank] = running
        return running

    def start_all(
        self, *options: str | os.PathLike[str], order: Sequence[int] = (2, 0, 1), **more: Any
    ) -> None:
        for rank in order:
            self.start(rank, *options, **more)

    def wait_for_connections(self, count: int) -> None:
        """Listen in place of node 0, wait until launchers of ``count`` hosts have connected, and
        hang up."""
        listening = self.hosts.popen("n1", [sys.executable, "-c", LISTENS, str(PORT), str(count)])
        assert listening.wait(LONG_S) == 0

    def wait_ready(self, *ranks: int, attempt: int = 0) -> list[dict[str, Any]]:
        """Wait until these workers run. Return what each of them reports."""
        paths = [self.hosts.work / f"ready-{attempt}-{rank}" for rank in ranks]

        def there() -> bool:
            ended = {
                rank: each.stderr
                for rank, each in self.by_rank.items()
                if (each.process.poll() or 0) > 0
            }
            assert not ended, ended
            return all(path.exists() for path in paths)

        try:
            until(there, f"workers {ranks} of attempt {attempt}", within_s=LONG_S)
        except AssertionError as exc:
            message = "\n".join(f"--- {rank}\n{each.stderr}" for rank, each in self.by_rank.items())
            raise AssertionError(f"{exc}\n{message}") from None
        return [json.loads(path.read_text()) for path in paths]

    def put_sign(self, sign: str) -> None:
        (self.hosts.work / sign).touch()

    def exit_codes(self, within_s: float = LONG_S) -> dict[Any, int]:
        """Wait until all launchers have ended. Return their exit codes by node rank."""
        codes = {rank: each.wait(within_s).returncode for rank, each in self.by_rank.items()}
        for rank, each in self.by_rank.items():
            assert "Traceback" not in each.stderr, (rank, each.stderr)
        return codes

    def stderr_of(self, rank: Any) -> str:
        return self.by_rank[rank].stderr
