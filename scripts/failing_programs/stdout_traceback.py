# workers: 3
# expect-rank: 2
# expect-exit: 3
# expect-cause: AssertionError
# expect-cause: token id 32017 >= vocab size 32000
# expect-frame: check_batch
# misleads: libpng warning
"""The traceback is printed on stdout, and a native library writes warnings on stderr until the end."""
import os
import sys
import time
import traceback

RANK = int(os.environ["RANK"])
VOCAB = 32000


def check_batch(tokens):
    highest = max(tokens)
    assert highest < VOCAB, f"token id {highest} >= vocab size {VOCAB}"


def main():
    for step in range(40):
        sys.stderr.write("libpng warning: iCCP: known incorrect sRGB profile\n")
        sys.stderr.flush()
        check_batch([1, 2, 32017 if RANK == 2 and step == 3 else 5])
        time.sleep(0.2)


try:
    main()
except BaseException:
    print("-" * 60)
    traceback.print_exc(file=sys.stdout)
    print("-" * 60)
    sys.stdout.flush()
    for _ in range(6):
        sys.stderr.write("libpng warning: iCCP: known incorrect sRGB profile\n")
    sys.exit(3)
