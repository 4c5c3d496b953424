# workers: 4
# expect-rank: 1
# expect-exit: 139
# expect-cause: SIGSEGV | Segmentation fault | signal 11
# expect-frame: crop_resize
# expect-hint: native | library | extension | faulthandler
"""An image extension reads through a wild pointer on one image; nothing is printed."""
import ctypes
import os
import random
import time

RANK = int(os.environ["RANK"])


def crop_resize(address, size):
    return ctypes.string_at(address, size)


def augment(image):
    return crop_resize(image, 16)


def main():
    random.seed(RANK)
    good = ctypes.create_string_buffer(64)
    for step in range(100):
        address = 8 if RANK == 1 and step == 7 else ctypes.addressof(good)
        augment(address)
        if step % 5 == 0:
            print(f"step {step} loss {random.random():.3f}", flush=True)
        time.sleep(0.1)


main()
