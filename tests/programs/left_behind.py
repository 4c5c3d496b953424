"""Leave one rank behind in a collective of gloo: ``left_behind.py RANK``. It comes with the sign ``go``.

Each rank makes the sign ``ready-RANK`` after the first collectives.
"""

import os
import sys

import survivor
import torch
import torch.distributed
from signs import await_sign, sign

survivor.hold()
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
for _ in range(3):
    torch.distributed.all_reduce(torch.ones(4, 3))
sign(f"ready-{rank}")
if rank == int(sys.argv[1]):
    await_sign("go")
torch.distributed.all_reduce(torch.ones(7, 8))
torch.distributed.destroy_process_group()
