"""Write COUNT lines of 130 bytes to stdout, in writes of 500 whole lines; EQUAL makes them the same on all ranks."""

import os
import sys

import common

count, equal = int(sys.argv[1]), sys.argv[2:] == ["equal"]
who = b"<rr>" if equal else b"<r%d>" % common.RANK
common.stamp("start", common.STARTED_NS)
for first in range(0, count, 500):
    block = b"".join(b"%s %08d %s\n" % (who, line, b"x" * 115) for line in range(first, min(first + 500, count)))
    while block:
        block = block[os.write(1, block) :]
