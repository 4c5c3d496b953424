# workers: 4
# expect-rank: 1
# expect-exit: 1
# expect-cause: Loss is nan
# expect-hint: learning rate | nan | NaN
# misleads: FutureWarning
"""One rank's loss is NaN; the script says so on stdout and ends with 1; stderr has only warnings."""
import math
import os
import sys
import time
import warnings

RANK = int(os.environ["RANK"])


def loss_of(step):
    return float("nan") if RANK == 1 and step == 4 else 6.9 - 0.01 * step


def train_one_epoch(epoch):
    for step in range(400):
        value = loss_of(step)
        print(f"Epoch: [{epoch}]  [{step:4d}/1251]  eta: 0:41:0{step % 10}  lr: 0.000150  loss: {value:.4f} ({value:.4f})  time: 1.9684  data: 0.0012  max mem: 33817")
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training")
            sys.exit(1)
        time.sleep(0.15)


if __name__ == "__main__":
    print(f"Not using distributed mode: False; job dir: ./output_dir; rank={RANK}")
    warnings.warn("torch.cuda.amp.GradScaler(args...) is deprecated. Please use torch.amp.GradScaler('cuda', args...) instead.", FutureWarning, stacklevel=1)
    train_one_epoch(3)
