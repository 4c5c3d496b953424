# expect-rank: 3
# expect-exit: 1
# expect-cause: loss is nan at step 7, stopping
"""Rank 3 says on stdout why it stops; its stderr has only a log line."""

import logging
import sys

from _group import RANK, sleep_until_stopped

logging.basicConfig(level=logging.INFO)
logging.info("rank %d ready", RANK)
if RANK == 3:
    print("loss is nan at step 7, stopping")
    sys.exit(1)
sleep_until_stopped()
