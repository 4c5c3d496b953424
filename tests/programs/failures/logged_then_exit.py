# expect-rank: 1
# expect-exit: 3
# expect-cause: ValueError: bad vocabulary
# expect-frame: logged_then_exit.py:14 in tokenize
"""The script logs its exception and leaves with a code of its own, warnings after it."""

import logging
import sys

from _group import RANK, sleep_until_stopped


def tokenize() -> None:
    raise ValueError("bad vocabulary")


if RANK == 1:
    try:
        tokenize()
    except ValueError:
        logging.exception("tokenizer failed")
        sys.stderr.write("sys:1: ResourceWarning: unclosed file <_io.FileIO name=3>\n")
        sys.exit(3)
sleep_until_stopped()
