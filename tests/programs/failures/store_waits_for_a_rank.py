# expect-rank: 1
# expect-exit: 1
# expect-cause: did not join the process group that ranks 0,2-3 waited for in init_process_group: 3 of 4 joined
# expect-frame: store_waits_for_a_rank.py:14 in read_data
"""Rank 1 reads its data and does not join the group in time: rank 0's store counts 3 of 4 clients."""

import time

from _group import RANK, join


def read_data() -> None:
    if RANK == 1:
        time.sleep(40)
        return


read_data()
join(timeout_s=3)
