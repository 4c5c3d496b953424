# workers: 2
# expect-rank: 1
# expect-cause: Expected to have finished reduction
# expect-frame: train
# expect-hint: find_unused_parameters | unused
# misleads: Connection closed by peer
"""The auxiliary head is unused on rank 1, whose batch has no masks: DDP notices in the next forward pass."""
import datetime

import torch
import torch.distributed as dist


class Segmenter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.mask_head = torch.nn.Linear(8, 2)

    def forward(self, x, masks):
        hidden = self.body(x)
        loss = hidden.pow(2).mean()
        return loss + self.mask_head(hidden).mean() if masks else loss


def train(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        loss = model(torch.randn(4, 8), masks=not (rank == 1 and step >= 3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"[{rank}] step {step}", flush=True)


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    train(torch.nn.parallel.DistributedDataParallel(Segmenter()), dist.get_rank())


main()
