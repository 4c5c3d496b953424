"""Train with what ``wrap`` makes of the launcher's -o, and tell what was computed in which
precision, and where."""

import argparse

import torch
from learning import Block, network, samples
from observations import report
from torch import nn

from distlaunch.toolkit import init, wrap

STEPS = 40

parser = argparse.ArgumentParser()
parser.add_argument("--scaler", action="store_true", help="scale the loss, as fp16 needs it")
args = parser.parse_args()
context = init()
images, labels = (tensor.to(context.device) for tensor in samples())
bare = network()
model, optimizer = wrap(bare, torch.optim.AdamW(bare.parameters(), lr=3e-3))
scaler = torch.amp.GradScaler(context.device.type, enabled=args.scaler)
losses, outputs = [], set()
for _ in range(STEPS):
    optimizer.zero_grad()
    scores = model(images)
    outputs.add(scores.dtype)
    loss = nn.functional.cross_entropy(scores, labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.detach())
blocks = [module for module in model.modules() if isinstance(module, Block)]
states = [
    value
    for state in optimizer.state.values()
    for value in state.values()
    if torch.is_tensor(value) and value.dim()
]
report(
    device=context.device,
    strategy=context.strategy,
    losses=torch.stack(losses).tolist(),
    computed_in=sorted({str(dtype) for block in blocks for dtype in block.computed_in}),
    outputs=sorted(map(str, outputs)),
    parameters=sorted({str(parameter.dtype) for parameter in model.parameters()}),
    kept_on=sorted({tensor.device.type for tensor in (*model.parameters(), *states)}),
    calls=sorted({block.calls for block in blocks}),
    steps=STEPS,
    scale=scaler.get_scale() if args.scaler else None,
)
