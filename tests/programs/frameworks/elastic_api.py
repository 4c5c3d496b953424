"""Use what torch offers to scripts under torchrun: is_torchelastic_launched, @record, a device mesh, env:// or tcp://."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert dist.is_torchelastic_launched()
    where = {"env": "env://", "tcp": "tcp://{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)}[sys.argv[1]]
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == world * (world + 1) / 2
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    assert mesh.get_local_rank("data") == rank
    assert dist.get_node_local_rank() == int(os.environ["LOCAL_RANK"])
    dist.barrier()
    dist.destroy_process_group()
    print(f"done {rank} 1 {total.item():.6f}")
    if rank == 1 and "FAIL" in os.environ:
        raise KeyError("recorded")


main()
