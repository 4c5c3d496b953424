"""Print the GPUs that this worker sees."""

import os

import torch
from observations import report

there = torch.cuda.is_available()
report(
    mask=os.environ.get("CUDA_VISIBLE_DEVICES"),
    local_rank=int(os.environ["LOCAL_RANK"]),
    available=there,
    count=torch.cuda.device_count() if there else 0,
    uuids=[
        str(torch.cuda.get_device_properties(number).uuid)
        for number in range(torch.cuda.device_count())
    ]
    if there
    else [],
)
