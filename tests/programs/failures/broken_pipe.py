# expect-rank: 2
# expect-exit: 1
# expect-cause: BrokenPipeError
# expect-frame: broken_pipe.py:17 in feed
"""A pipe of the program's own breaks: here it is the cause, not a lost peer."""

import subprocess

from _group import RANK, sleep_until_stopped


def feed() -> None:
    with subprocess.Popen(["/bin/true"], stdin=subprocess.PIPE, bufsize=0) as reader:
        reader.wait()
        assert reader.stdin is not None
        for _ in range(2):
            reader.stdin.write(b"batch")


if RANK == 2:
    feed()
sleep_until_stopped()
