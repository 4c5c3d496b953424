# workers: 3
# expect-rank: 0
# expect-exit: 134
# expect-cause: double free | free(): invalid
# expect-frame: close_decoder | release
# expect-hint: native | library | extension | versions
"""A decoder's Python binding frees its context twice; the C library aborts."""
import ctypes
import os
import time

RANK = int(os.environ["RANK"])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]


class Decoder:
    def __init__(self):
        self.context = libc.malloc(64)

    def release(self):
        libc.free(self.context)


def close_decoder(decoder):
    decoder.release()
    if RANK == 0:
        decoder.release()


def main():
    for clip in range(12):
        decoder = Decoder()
        if clip == 9:
            close_decoder(decoder)
        print(f"[{RANK}] clip {clip}: 16 frames", flush=True)
        time.sleep(0.08)
    time.sleep(20)


main()
