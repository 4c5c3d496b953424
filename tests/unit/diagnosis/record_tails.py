"""Record the ends of the programs in tests/programs/failures, for unit tests without torch.

Run by hand: ``python tests/unit/diagnosis/record_tails.py [PROGRAM…]``. It starts four workers per
program, lets failures spread for a second, stops the rest and writes ``recorded/<program>.json``
with every worker's end. Paths of the machine are replaced, bytes are kept as latin-1 text.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE.parents[1] / "programs" / "failures"
WORLD_SIZE = 4
LIMIT_S = 45.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def neutral(data: bytes) -> str:
    """Replace this machine's paths by a user's."""
    for real, shown in (
        (str(PROGRAMS), "/home/user/project"),
        (sysconfig.get_paths()["purelib"], "/home/user/venv/lib/python3.11/site-packages"),
        (sysconfig.get_paths()["stdlib"], "/usr/lib/python3.11"),
        (sys.executable, "/home/user/venv/bin/python"),
        (socket.gethostname(), "node1"),
    ):
        data = data.replace(real.encode(), shown.encode())
    return data[-16384:].decode("latin-1")


def run(program: Path, scratch: Path) -> list[dict[str, object]]:
    """Run one program with four workers. Return their ends in order."""
    port = free_port()
    base = {
        "PATH": os.environ["PATH"],
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # as distlaunch's bootstrap does
        "HOME": str(scratch),
    }
    workers: dict[int, subprocess.Popen[bytes]] = {}
    for rank in range(WORLD_SIZE):
        env = base | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(WORLD_SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_ERROR_FILE": str(scratch / f"{program.stem}-{rank}.json"),
        }
        with (
            (scratch / f"{program.stem}-{rank}.out").open("wb") as out,
            (scratch / f"{program.stem}-{rank}.err").open("wb") as err,
        ):
            workers[rank] = subprocess.Popen(
                [sys.executable, str(program)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
    began = time.monotonic()
    ended: dict[int, tuple[float, bool]] = {}
    raised: dict[int, float] = {}
    stop_at: float | None = None
    reported = False
    while len(ended) < WORLD_SIZE:
        now = time.monotonic() - began
        for rank, worker in workers.items():
            written = (scratch / f"{program.stem}-{rank}.err").read_bytes()
            if rank not in raised and b"Traceback (most recent call last)" in written:
                raised[rank] = now
            if rank not in ended and worker.poll() is not None:
                ended[rank] = (now, reported)
                if worker.returncode != 0 and stop_at is None:
                    stop_at = now + float(os.environ.get("SPREAD_S", "1"))
        for number, since in ((15, 0.0), (9, 2.0)):
            if now > LIMIT_S or (stop_at is not None and now > stop_at + since):
                reported = True
                for rank, worker in workers.items():
                    if rank not in ended:
                        worker.send_signal(number)
        time.sleep(0.02)
    ends: list[dict[str, object]] = []
    for rank, (when, stopped) in sorted(ended.items(), key=lambda item: item[1][0]):
        error_file = scratch / f"{program.stem}-{rank}.json"
        ends.append(
            {
                "rank": rank,
                "returncode": workers[rank].returncode,
                "ended_s": round(when, 3),
                "told_to_stop": stopped,
                "traceback_age_s": round(when - raised[rank], 3) if rank in raised else None,
                "stdout_tail": neutral((scratch / f"{program.stem}-{rank}.out").read_bytes()),
                "stderr_tail": neutral((scratch / f"{program.stem}-{rank}.err").read_bytes()),
                "error_file": neutral(error_file.read_bytes()) if error_file.exists() else None,
            }
        )
    return ends


def main() -> None:
    """Record the named programs, or all."""
    wanted = sys.argv[1:] or sorted(path.stem for path in PROGRAMS.glob("[!_]*.py"))
    (HERE / "recorded").mkdir(exist_ok=True)
    for name in wanted:
        with tempfile.TemporaryDirectory() as scratch:
            ends = run(PROGRAMS / f"{name}.py", Path(scratch))
        (HERE / "recorded" / f"{name}.json").write_text(
            json.dumps(ends, indent=1) + "\n", encoding="utf-8"
        )
        print(
            name,
            [(end["rank"], end["returncode"], end["told_to_stop"]) for end in ends],
            flush=True,
        )


if __name__ == "__main__":
    main()
