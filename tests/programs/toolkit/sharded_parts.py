"""Train a model in bf16 whose optimizer keeps copies in fp32, beside averages of its weights; resume, and save again.

argv: the directory, and which averages. Digests tell of all of it, whatever is sharded how, at the start and the end.
"""

import hashlib
import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distlaunch.toolkit import Checkpoint, init, wrap


class Master(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float().clone()
                state["master"] -= 1e-3 * parameter.grad.float()
                parameter.copy_(state["master"])


class Average:
    """``late``: it has nothing before its first update; ``assigned``: it keeps what it is given."""

    def __init__(self, kind):
        self.kind = kind
        self.kept = {} if kind == "late" else self.now()

    def now(self):
        return {name.removeprefix("module."): each.detach().float().clone() for name, each in model.named_parameters()}

    def update(self):
        self.kept = self.kept or self.now()
        for name, each in self.now().items():
            self.kept[name].lerp_(each, 0.1)

    def state_dict(self):
        return {"kept": [self.kept], "kind": self.kind}

    def load_state_dict(self, state):
        if self.kind != "copied":
            self.kept = state["kept"][0]
            return
        for name, each in state["kept"][0].items():
            self.kept[name].copy_(each)


def train(inputs):
    optimizer.zero_grad()
    model(inputs.bfloat16()).square().sum().backward()
    optimizer.step()


def digest(values):
    hashed = hashlib.sha256()
    for value in values:
        assert value.dtype == torch.float32
        hashed.update((value.full_tensor() if isinstance(value, DTensor) else value).numpy().tobytes())
    return hashed.hexdigest()[:16]


def tell(when):
    kept = [optimizer.state[each]["master"] for each in model.parameters() if each in optimizer.state]
    reported = " ".join(f"{each.kind} {digest(each.kept.values())}" for each in averages)
    print(f"{when}: masters {digest(kept)} {reported}".strip(), flush=True)


context = init(seed=3)
torch.set_num_threads(1)
averages = []
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).bfloat16()
optimizer = Master(model.parameters(), lr=0.1)
train(torch.ones(5, 8))  # it is wrapped with what it has learnt
tell("learnt")
model, optimizer = wrap(model, optimizer)
averages += [Average(kind) for kind in sys.argv[2:]]
tell("wrapped")
checkpoint = Checkpoint(sys.argv[1], model=model, optimizer=optimizer, **{each.kind: each for each in averages})
start = checkpoint.resume()
tell("begins")
train(torch.rand(5, 8))
for each in averages:
    each.update()
tell("ends")
checkpoint.save(start)
checkpoint.close()
