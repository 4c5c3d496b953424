# expect-rank: 2
# expect-exit: 1
# expect-cause: libcudnn_of_nowhere.so.9: cannot open shared object file
# expect-hint: LD_LIBRARY_PATH
"""A shared library that the loader cannot find, at the import of a module that needs it."""

import ctypes

from _group import RANK, sleep_until_stopped

if RANK == 2:
    ctypes.CDLL("libcudnn_of_nowhere.so.9")
sleep_until_stopped()
