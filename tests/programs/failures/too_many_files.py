# expect-rank: 0
# expect-exit: 1
# expect-cause: Too many open files
# expect-hint: ulimit -n
"""The limit of open files is reached."""

import resource

from _group import RANK, sleep_until_stopped

if RANK == 0:
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    files = [open("/dev/null") for _ in range(64)]
sleep_until_stopped()
