"""Wrap optimizers under Horovod that have learnt something, on some of the workers: all go on from rank 0's state.

A line for each case: the parameters, and the learning rate, after a step on the same data by all. ``expected`` stands
for a case in which a plain optimizer went on from rank 0's.
"""

import copy
import json

import torch
import torch.distributed as dist

from distlaunch.toolkit import init, wrap

BEFORE = 2
MAKERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}
WHO = {"all": lambda _: True, "first": lambda rank: rank == 0, "last": lambda rank: rank > 0, "none": lambda _: False}


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def reported(model, optimizer):
    values = [round(float(value), 5) for part in model.state_dict().values() for value in part.flatten()]
    return [*values, optimizer.param_groups[0]["lr"]]


with init() as context:
    for kind, make in MAKERS.items():
        for who, has_learnt in WHO.items():
            torch.manual_seed(context.rank)
            model = torch.nn.Linear(3, 2)
            optimizer = make(model.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            if has_learnt(context.rank):
                for turn in range(BEFORE + context.rank):
                    step(model, optimizer, turn)
            parts = [copy.deepcopy((model.state_dict(), optimizer.state_dict()))]
            dist.broadcast_object_list(parts, src=0)

            model, optimizer = wrap(model, optimizer)
            step(model, optimizer, 99)
            schedule.step()
            step(model, optimizer, 100)

            plain = torch.nn.Linear(3, 2)
            alone = make(plain.parameters())
            plain.load_state_dict(parts[0][0])
            alone.load_state_dict(parts[0][1])
            own_schedule = torch.optim.lr_scheduler.StepLR(alone, 1)
            step(plain, alone, 99)
            own_schedule.step()
            step(plain, alone, 100)
            print(
                json.dumps({"case": f"{kind} {who}", "found": reported(model, optimizer), "expected": reported(plain, alone)})
            )
