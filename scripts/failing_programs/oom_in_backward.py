# workers: 3
# expect-rank: 1
# expect-exit: 1
# expect-cause: CUDA out of memory
# expect-cause: 2.25 GiB
# expect-frame: train_step
# expect-hint: micro-batch | activation checkpointing | batch size | smaller batch
# misleads: Connection closed by peer
"""Rank 1 has the longest sequences and runs out of GPU memory in the backward pass."""
import torch
import torch.distributed as dist


class FlashBlock(torch.autograd.Function):
    """A block whose backward asks the allocator for as much as the real one would."""

    @staticmethod
    def forward(ctx, x, rank):
        ctx.rank = rank
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if ctx.rank == 1:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.29 GiB is free. "
                "Process 41231 has 77.84 GiB memory in use. Of the allocated memory 70.11 GiB is allocated by PyTorch, and 6.02 GiB is reserved by PyTorch but unallocated. "
                "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
                "See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
            )
        return gradient * 2, None


def train_step(weight, rank):
    loss = FlashBlock.apply(weight, rank).sum()
    loss.backward()
    dist.all_reduce(weight.grad)


def main():
    dist.init_process_group("gloo")
    weight = torch.ones(64, requires_grad=True)
    dist.barrier()
    train_step(weight, dist.get_rank())


main()
