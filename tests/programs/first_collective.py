"""Leave rank 1 behind before its first collective, in two groups: ranks 0-1 and ranks 1-2.

Rank 1 goes on at the sign ``go``.
"""

import survivor
import torch
import torch.distributed as dist
from signs import await_sign, sign

survivor.hold()
dist.init_process_group("gloo")
rank = dist.get_rank()
left = dist.new_group([0, 1], backend="gloo", group_desc="left")
right = dist.new_group([1, 2], backend="gloo", group_desc="right")
sign(f"ready-{rank}")
if rank == 1:
    await_sign("go")
for group in (left, right):
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(torch.ones(7, 8), group=group)
dist.destroy_process_group()
