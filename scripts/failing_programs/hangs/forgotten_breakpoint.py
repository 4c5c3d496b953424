# workers: 2
# hang-timeout: 8
# expect-rank: 1
# expect-cause: breakpoint | set_trace | debug_batch
# expect-hint: breakpoint | debugger | input | pdb
"""A debugger that waits for a connection was left in the branch for bad batches; rank 1 has one."""
import socket

import torch
import torch.distributed as dist


class RemotePdb:
    """Wait for somebody to connect, as remote debuggers do."""

    def set_trace(self):
        server = socket.create_server(("127.0.0.1", 0))
        print(f"RemotePdb session open at 127.0.0.1:{server.getsockname()[1]}, waiting for connection ...", flush=True)
        server.accept()


def debug_batch(batch):
    RemotePdb().set_trace()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(10):
        batch = torch.full((4,), float(step))
        if rank == 1 and step == 6:
            batch[2] = float("inf")
        if not torch.isfinite(batch).all():
            debug_batch(batch)
        dist.all_reduce(batch)
        print(f"[{rank}] step {step}", flush=True)


main()
