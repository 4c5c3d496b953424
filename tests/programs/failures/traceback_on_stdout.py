# expect-rank: 0
# expect-exit: 4
# expect-cause: KeyError: 'tokens'
# expect-frame: traceback_on_stdout.py:14 in read
"""Rank 0 catches its exception, prints the traceback to stdout and leaves with a code of its own."""

import sys
import traceback

from _group import RANK, sleep_until_stopped


def read(sample: dict[str, int]) -> int:
    return sample["tokens"]


if RANK == 0:
    try:
        read({})
    except KeyError:
        traceback.print_exc(file=sys.stdout)
        sys.exit(4)
sleep_until_stopped()
