"""Print numbered lines: COUNT lines of WIDTH bytes each, then end with CODE (0); ``rank line xxxx…``."""

import os
import sys

import survivor

survivor.hold()
count, width = int(sys.argv[1]), int(sys.argv[2])
code = int(sys.argv[3]) if len(sys.argv) > 3 else 0
rank = int(os.environ["RANK"])
lines = []
for number in range(count):
    lines.append(b"%d %d " % (rank, number) + b"x" * width)
    if len(lines) == 64:
        sys.stdout.buffer.write(b"\n".join(lines) + b"\n")
        sys.stdout.buffer.flush()
        lines.clear()
if lines:
    sys.stdout.buffer.write(b"\n".join(lines) + b"\n")
    sys.stdout.buffer.flush()
sys.exit(code)
