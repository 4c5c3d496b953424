# workers: 4
# expect-rank: 0,3
# expect-exit: 1
# expect-cause: No space left on device
# expect-cause: Input contains NaN
# expect-hint: disk | space
# misleads: Connection closed
"""The checkpoint of rank 0 fills the disk; 0.1 s later rank 3's metric meets a NaN. Both must be repaired.

Rank 0's interpreter needs half a second to end after its traceback, as those with a writer thread do.
"""
import os
import sys
import threading
import time

import numpy
from sklearn.metrics import mean_squared_error

RANK = int(os.environ["RANK"])


def flush_writer():
    open("rank-0-fails", "w").close()
    time.sleep(0.7)


def save(path, array):
    with open(path, "wb") as file:
        file.write(array.tobytes())


def validate():
    target = numpy.linspace(0, 1, 50)
    predicted = target.copy()
    if RANK == 3:
        predicted[17] = float("nan")
    return mean_squared_error(target, predicted)


def main():
    print(f"[{RANK}] validating epoch 4", flush=True)
    if RANK == 0:
        os.symlink("/dev/full", "epoch-4.npy")
        try:
            save("epoch-4.npy", numpy.zeros(100000))
        except OSError:
            sys.excepthook(*sys.exc_info())
            threading.Thread(target=flush_writer).start()  # the interpreter waits for it
            sys.exit(1)
    while not os.path.exists("rank-0-fails"):
        time.sleep(0.01)
    time.sleep(0.1)
    validate()
    time.sleep(20)


main()
