"""Write bytes that are no text to both streams, the last line unfinished: every byte value, NULs, no UTF-8."""

import os

import survivor

survivor.hold()
rank = int(os.environ["RANK"])
for count in range(64):
    os.write(1, b"<out %d.%d>" % (rank, count) + bytes(range(256)) + b"\0" * 100)
    os.write(2, b"<err %d.%d>" % (rank, count) + bytes(reversed(range(256))) + b"\xff\xfe\n")
os.write(1, b"the end without a newline")
