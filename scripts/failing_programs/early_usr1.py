# workers: 3
# expect-rank: 2
# expect-exit: 138
# expect-cause: SIGUSR1 | signal 10
# expect-hint: handler | signal
"""A checkpoint-now signal reaches a rank that is still reading its configuration and has no handler yet."""
import os
import signal
import time

RANK = int(os.environ["RANK"])


def on_signal(_number, _frame):
    print(f"rank {RANK}: will save after this step", flush=True)


def others():
    while not all(os.path.exists(f"pid-{rank}") for rank in range(3)):
        time.sleep(0.02)
    return [int(open(f"pid-{rank}").read()) for rank in range(3)]


def main():
    with open(f"pid-{RANK}.tmp", "w") as file:
        file.write(str(os.getpid()))
    if RANK == 2:
        os.rename(f"pid-{RANK}.tmp", f"pid-{RANK}")
        print("rank 2: reading 112 configuration files", flush=True)
        time.sleep(30)
    signal.signal(signal.SIGUSR1, on_signal)
    os.rename(f"pid-{RANK}.tmp", f"pid-{RANK}")
    pids = others()
    if RANK == 0:  # rank 0 passes the scheduler's warning on
        print("rank 0: 300 s until the end of the allocation, all ranks save", flush=True)
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
    for step in range(100):
        print(f"step {step}", flush=True)
        time.sleep(0.3)


main()
