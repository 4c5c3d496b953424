"""Warm start with pandas and pyarrow, whose allocator starts a thread at the import by default."""

from __future__ import annotations

import subprocess

SEES = """
import os, sys
print(*(name in sys.modules for name in ("pandas", "pyarrow")), len(os.listdir("/proc/self/task")), flush=True)
import pandas, pyarrow
pool = pyarrow.jemalloc_memory_pool()
numbers = pyarrow.array(range(100_000), memory_pool=pool)
print(numbers.to_pandas().sum(), pool.bytes_allocated() > 0, os.environ.get("JE_ARROW_MALLOC_CONF"))
"""
THREADS = (
    "import glob, pyarrow\n"
    "print(any('jemalloc' in open(name).read() for name in glob.glob('/proc/self/task/*/comm')))\n"
)


def test_workers_are_forked_with_pandas_and_pyarrow_imported(pyarrow_python, distlaunch):
    alone = subprocess.run(
        [pyarrow_python, "-c", THREADS], capture_output=True, text=True, timeout=60, check=True
    )
    assert alone.stdout == "True\n", (
        "pyarrow still starts its thread: else this test proves nothing"
    )
    (distlaunch.work / "train.py").write_text(SEES)
    words = [
        pyarrow_python,
        "-m",
        "distlaunch",
        "train",
        "--num-procs",
        "2",
        "--preload",
        "pandas,pyarrow",
        "train.py",
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=100, env=distlaunch.env, cwd=distlaunch.work
    )
    assert done.returncode == 0, done.stderr
    assert "preload: " not in done.stderr
    [logs] = (distlaunch.jobs).glob("[0-9]*/attempt-0")
    for rank in (0, 1):
        assert (logs / f"rank-{rank}.log").read_text().splitlines() == [
            "True True 1",
            "4999950000 True None",
        ]
