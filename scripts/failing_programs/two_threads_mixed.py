# workers: 2
# expect-rank: 0
# expect-exit: 1
# expect-cause: PermissionError
# expect-cause: /ckpt/run7/step-400.pt
# expect-hint: permission | owner | writable
# misleads: RuntimeError: cannot schedule new futures
"""Two threads write their tracebacks to stderr at once, a line of each in turn; the saver's is the cause."""
import os
import sys
import threading
import time
import traceback

RANK = int(os.environ["RANK"])


def save(path):
    raise PermissionError(13, "Permission denied", path)


def log_metrics():
    raise RuntimeError("cannot schedule new futures after shutdown")


def caught(work, *args):
    try:
        work(*args)
    except Exception:
        return traceback.format_exc().splitlines()
    return []


def main():
    print(f"rank {RANK} step 400", flush=True)
    if RANK == 1:
        time.sleep(25)
        return
    time.sleep(0.4)
    lines = []
    saver = threading.Thread(target=lambda: lines.append(caught(save, "/ckpt/run7/step-400.pt")))
    saver.start()
    saver.join()
    logger = threading.Thread(target=lambda: lines.append(caught(log_metrics)))
    logger.start()
    logger.join()
    first, second = lines
    for index in range(max(len(first), len(second))):
        for part in (first, second):
            if index < len(part):
                sys.stderr.write(part[index] + "\n")
    sys.exit(1)


main()
