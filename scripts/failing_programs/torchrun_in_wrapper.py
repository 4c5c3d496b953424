# workers: 2
# expect-rank: 1
# expect-exit: 1
# expect-cause: size mismatch for head.weight
# expect-frame: load
# misleads: ChildFailedError
"""Each worker is an old wrapper that starts torchrun itself; on rank 1 the inner script fails to load weights."""
import os
import subprocess
import sys
import time

RANK = os.environ.get("OUTER_RANK") or os.environ["RANK"]


def load(model):
    import torch

    classes = 21 if RANK == "1" else 10
    model.load_state_dict({"head.weight": torch.zeros(classes, 8), "head.bias": torch.zeros(classes)})


def train():
    import torch

    model = torch.nn.Module()
    model.head = torch.nn.Linear(8, 10)
    load(model)
    print("loaded", flush=True)
    time.sleep(35)


def wrapper():
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") and not name.startswith("TORCHELASTIC")}
    env["OUTER_RANK"] = RANK
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", os.path.abspath(__file__)]
    print("+", " ".join(command[1:]), flush=True)
    return subprocess.call(command, env=env)


if __name__ == "__main__":
    if "OUTER_RANK" in os.environ:
        train()
    else:
        sys.exit(wrapper())
