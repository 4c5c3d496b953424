"""Make a block of shared memory that nobody unlinks but Python's resource tracker; rank 0 then crashes."""

import os
import time
from multiprocessing import shared_memory

block = shared_memory.SharedMemory(create=True, size=1_000_000)
sign = f"block-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
with open(f".{sign}", "w") as file:
    file.write(block.name)
os.rename(f".{sign}", sign)
while not all(os.path.exists(f"block-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}") for rank in range(2)):
    time.sleep(0.005)
if os.environ["RANK"] == "0":
    os._exit(3)
time.sleep(600)
