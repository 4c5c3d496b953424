# expect-rank: 0
# expect-exit: 1
# expect-cause: did not join the process group that ranks 1-3 waited for in init_process_group: their connections to its TCPStore timed out after 3 s
# expect-frame: rank_0_comes_late.py:15 in download
# expect-hint: before init_process_group
"""Rank 0 downloads its data before it joins the group, so that the others find no store."""

import time

from _group import RANK, join


def download() -> None:
    if RANK == 0:
        time.sleep(40)


download()
join(timeout_s=3)
