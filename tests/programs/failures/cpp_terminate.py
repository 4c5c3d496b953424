# expect-rank: 0
# expect-exit: 134
# expect-cause: std::
"""An uncaught C++ exception ends rank 0: the text after what() is the cause."""

import ctypes

import torch
from _group import RANK, join, steps

join()
steps(3)
if RANK == 0:
    runtime = ctypes.CDLL("libstdc++.so.6")
    runtime._ZSt20__throw_length_errorPKc.argtypes = [ctypes.c_char_p]
    runtime._ZSt20__throw_length_errorPKc(b"vector::_M_default_append")
    torch.zeros(1)
steps(10**9)
