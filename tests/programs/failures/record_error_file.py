# expect-rank: 3
# expect-exit: 1
# expect-cause: ArithmeticError: gradient norm is inf
# expect-frame: record_error_file.py:18 in clip
"""The script uses torch's @record and hides its stderr: only the error file tells."""

import os

from _group import RANK, join, steps
from torch.distributed.elastic.multiprocessing.errors import record

join()
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def clip(norm: float) -> None:
    if norm == float("inf"):
        raise ArithmeticError(f"gradient norm is {norm}")


@record
def main() -> None:
    steps(2)
    clip(float("inf") if RANK == 3 else 1.0)
    steps(10**9)


main()
