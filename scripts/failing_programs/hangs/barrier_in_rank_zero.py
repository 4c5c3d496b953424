# workers: 3
# hang-timeout: 10
# expect-rank: 0
# expect-cause: save_checkpoint
# expect-hint: if rank == 0 | all ranks | every rank | same | order
"""The barrier after the checkpoint stands under the test for rank 0; the others are in the next step's reduction."""
import torch
import torch.distributed as dist


def save_checkpoint(step):
    with open(f"step-{step}.txt", "w") as file:
        file.write("weights")
    dist.barrier()


def train_step(gradient):
    dist.all_reduce(gradient)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(12):
        train_step(torch.ones(32))
        print(f"[{rank}] step {step}", flush=True)
        if rank == 0 and step == 7:
            save_checkpoint(step)


main()
