"""Write COUNT lines of 130 bytes to stdout; EQUAL makes them the same on all ranks.

HOW is ``print`` (as scripts do: the launcher's environment decides what Python buffers) or
``block`` (500 lines a write: the worker costs next to nothing, what is left is the launcher's own
speed).
"""

import os
import sys

import common

how, count, equal = sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["equal"]
who = "<rr>" if equal else f"<r{common.RANK}>"
filler = "x" * 115
common.stamp("start", common.STARTED_NS)
if how == "print":
    for number in range(count):
        print(f"{who} {number:08d} {filler}")
else:
    for first in range(0, count, 500):
        numbers = range(first, min(first + 500, count))
        block = "".join(f"{who} {number:08d} {filler}\n" for number in numbers).encode()
        while block:
            block = block[os.write(1, block) :]
