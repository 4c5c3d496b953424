"""Make mistakes of scripts, one after the other, and print the messages of the toolkit."""

import os
import sys

import torch
from torch import nn

from distlaunch.toolkit import init, wrap
from distlaunch.toolkit.toolkit_error import ToolkitError


def refused(call, **variables):
    os.environ.update(variables)
    try:
        call()
    except ToolkitError as exc:
        print(exc, flush=True)
    else:
        raise AssertionError(f"not refused: {variables}")
    for name in variables:
        del os.environ[name]


model = nn.Linear(2, 2)
fsdp = {"DISTLAUNCH_BACKEND": "fsdp"}
refused(lambda: wrap(model))
refused(init, RANK="0")
refused(init, RANK="3", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
refused(init, RANK="one", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
refused(init, OMPI_COMM_WORLD_SIZE="4")
refused(init, SLURM_STEP_NUM_TASKS="4")
NODE = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
refused(init, RANK="", **NODE)
refused(init, RANK="1", **NODE)
refused(init, RANK="1", LOCAL_RANK="5", LOCAL_WORLD_SIZE="2", **NODE)
refused(init, RANK="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3", **NODE)
refused(init, RANK="1", LOCAL_RANK="0", **NODE | {"MASTER_PORT": "99999"})
refused(lambda: init(device="cuda"))
refused(lambda: init(device="gpu"))
refused(lambda: init(seed=1 << 70))
refused(lambda: init(seed="x"))
refused(lambda: init(seeed=0))
refused(lambda: init(backend="bogus"))
refused(lambda: init(backend="nccl"))
refused(lambda: init(collective_timeout=-1))
refused(lambda: init(collective_timeout=float("inf")))
refused(init, CUDA_VISIBLE_DEVICES="0,1", DISTLAUNCH_JOB_ID="j")
refused(init, DISTLAUNCH_BACKEND_OPTIONS="{")
refused(init, DISTLAUNCH_BACKEND_OPTIONS="[" * 100_000)
refused(init, DISTLAUNCH_BACKEND_OPTIONS="[1]")
refused(init, DISTLAUNCH_BACKEND_OPTIONS='{"colective-timeout": 3}')
refused(init, DISTLAUNCH_BACKEND_OPTIONS='{"collective-timeout": 0}')
refused(init, DISTLAUNCH_BACKEND="horovod")

os.environ.update(fsdp)
context = init(device="cpu:0", seed=3)
assert context is init() is init(device="cpu:0", seed=3) is init(device=torch.device("cpu", 0)) is init(seed=3)
refused(lambda: init(seed=4))
refused(lambda: init(seed=0))
refused(lambda: init(seed=None))
refused(lambda: init(seed=3, backend="gloo"))
if os.fork() == 0:
    refused(init)
    sys.stdout.flush()
    os._exit(0)
os.wait()
refused(lambda: wrap(model, wrap_class="Block"))
refused(lambda: wrap(model, collective_timeout=3.0))
refused(lambda: wrap(model, sharding="ful"))
refused(lambda: wrap(model, bucket_mb=True))
refused(lambda: wrap(model), DISTLAUNCH_BACKEND_OPTIONS='{"cpu-offload": "yes"}')
refused(lambda: wrap(nn.ReLU()))
refused(lambda: wrap(nn.Linear(2, 2).requires_grad_(False)))
refused(lambda: wrap(nn.Linear(2, 2, device="meta")))
refused(lambda: wrap(model), DISTLAUNCH_BACKEND_OPTIONS='{"precision": "fp16"}', DISTLAUNCH_JOB_ID="j")
refused(lambda: wrap(nn.Sequential(model), wrap_classes="Block, Linear"))
refused(lambda: wrap(model, wrap_classes="Liner"))
refused(lambda: wrap(nn.Sequential(model), activation_checkpointing=True))
refused(lambda: wrap(model, torch.optim.SGD(nn.Linear(2, 2).parameters())))
refused(lambda: wrap(model, torch.optim.LBFGS(model.parameters())))
refused(lambda: wrap(model, torch.optim.Rprop(model.parameters())))
refused(lambda: wrap(model, torch.optim.SGD(model.parameters(), fused=True)))
refused(lambda: wrap(nn.Sequential(nn.Embedding(3, 2, sparse=True))))
scaled = nn.Linear(2, 2)
scaled.scale = nn.Parameter(torch.tensor(1.0))
refused(lambda: wrap(scaled))
left_out = torch.optim.SGD(model.parameters())
wrap(model, wrap_classes="Linear")
refused(left_out.step)
torch.optim.SGD(model.parameters()).step()
refused(lambda: wrap(model))
os.environ["DISTLAUNCH_BACKEND"] = "deepspeed"
refused(lambda: wrap(nn.Linear(2, 2)))
context.close()
refused(lambda: wrap(nn.Linear(2, 2)))
try:
    with init(seed=5):
        raise KeyError("a cell of a notebook that fails")
except KeyError:
    init(seed=6).close()
with init() as context:
    assert context is init(seed=0)
    assert type(context.seed) is int
    refused(lambda: init(seed=1))
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
refused(init)
torch.distributed.destroy_process_group()
