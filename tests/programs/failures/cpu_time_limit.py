# expect-rank: 1
# expect-exit: 152
# expect-cause: SIGXCPU
# expect-hint: ulimit -t
"""RLIMIT_CPU is used up."""

import resource

from _group import RANK, sleep_until_stopped

if RANK == 1:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 20))
    while True:
        pass
sleep_until_stopped()
