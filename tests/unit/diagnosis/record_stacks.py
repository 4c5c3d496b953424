"""Record the stacks of workers that hang, for unit tests without torch and other Pythons.

Run by hand: ``python tests/unit/diagnosis/record_stacks.py [KIND…]``, with ``PYTHONS`` for further
interpreters and ``PY_SPY`` for the profiler. It writes ``recorded_stacks/<kind>.<maker>.json`` with
one entry per worker (rank, pid, state, text). Paths and pids of the machine are replaced.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from record_tails import free_port

ALONE = (
    "lock",
    "event",
    "sleep",
    "loop",
    "c_loop",
    "queue",
    "join",
    "child",
    "download",
    "recursion",
    "many_threads",
    "slow_import",
    "import_lock",
    "coroutine",
    "debugger",
    "blocked_signal",
)
WITH_TORCH = ("dataloader",)
GROUPS = (
    "late_in_all_reduce",
    "late_in_backward",
    "other_collective",
    "late_in_barrier",
    "rendezvous",
    "stopped",
)


def neutral(text: str) -> str:
    """Replace this machine's paths by a user's."""
    text = text.replace(str(HERE), "/home/user/project").replace("hanging.py", "train.py")
    text = re.sub(
        r"/[\w./-]*?/lib/(python3\.\d+)/site-packages",
        r"/home/user/venv/lib/\1/site-packages",
        text,
    )
    text = re.sub(r"/[\w./-]*?/lib/(python3\.\d+)/(?!site-packages)", r"/usr/lib/\1/", text)
    text = re.sub(r"Process (\d+): .*", r"Process \1: /home/user/venv/bin/python train.py", text)
    return re.sub(r"Python v(\S+) \(.*\)", r"Python v\1 (/home/user/venv/bin/python)", text)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def record(
    kind: str, world_size: int, python: str, py_spy: str | None
) -> dict[str, list[dict[str, object]]]:
    """Run one kind. Return the output of faulthandler, and of py-spy if there is one, for each
    worker."""
    base = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    base |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    workers, dumps = [], []
    for rank in range(world_size):
        dump = tempfile.TemporaryFile()
        env = base | {"RANK": str(rank), "DUMP_FD": str(dump.fileno())}
        workers.append(
            subprocess.Popen(
                [python, str(HERE / "hanging.py"), kind],
                env=env,
                pass_fds=[dump.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        dumps.append(dump)
    found: dict[str, list[dict[str, object]]] = {"faulthandler": [], "py-spy": []}
    try:
        for worker in workers:
            worker.stdout.readline()  # type: ignore[union-attr] - a pipe, see above
        time.sleep(6 if kind in WITH_TORCH + GROUPS else 0.7)
        states = [state_of(worker.pid) for worker in workers]
        for worker in workers:
            worker.send_signal(signal.SIGRTMAX - 3)
        time.sleep(0.5)
        for rank, (worker, dump) in enumerate(zip(workers, dumps, strict=True)):
            dump.seek(0)
            text = neutral(dump.read().decode())
            entry = {"rank": rank, "pid": 4000 + rank, "state": states[rank], "text": text}
            found["faulthandler"].append(entry)
            if py_spy:
                command = [py_spy, "dump", "--full-filenames", "--pid", str(worker.pid)]
                message = subprocess.run(
                    command, capture_output=True, text=True, check=False
                ).stdout
                message = neutral(message.replace(str(worker.pid), str(4000 + rank)))
                found["py-spy"].append(entry | {"text": message})
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return found


def main() -> None:
    """Record the named kinds, or all."""
    pythons = {f"python{sys.version_info.major}{sys.version_info.minor}": sys.executable}
    for path in filter(None, os.environ.get("PYTHONS", "").split(":")):
        version = subprocess.run(
            [path, "-c", "import sys;print(*sys.version_info[:2],sep='')"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        pythons.setdefault(f"python{version}", path)
    out = HERE / "recorded_stacks"
    out.mkdir(exist_ok=True)
    own = next(iter(pythons))
    for kind in sys.argv[1:] or (*ALONE, *WITH_TORCH, *GROUPS):
        for name, python in pythons.items():
            if name != own and kind not in ("lock", "queue", "recursion", "slow_import"):
                continue
            found = record(
                kind,
                4 if kind in GROUPS else 1,
                python,
                os.environ.get("PY_SPY") if name == own else None,
            )
            for maker, entries in found.items():
                if entries and (
                    maker == "faulthandler"
                    or kind in ("lock", "queue", "stopped", "late_in_all_reduce")
                ):
                    label = name if maker == "faulthandler" else maker
                    path = out / f"{kind}.{label}.json"
                    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
                    print(
                        path.name,
                        [(one["state"], len(str(one["text"]))) for one in entries],
                        flush=True,
                    )


if __name__ == "__main__":
    main()
