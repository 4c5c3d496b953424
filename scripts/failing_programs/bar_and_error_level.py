# workers: 2
# expect-rank: 0
# expect-exit: 1
# expect-cause: checksum of shard_0007.bin
# misleads: huggingface/tokenizers
"""tqdm draws over the error; the logger writes level CRITICAL to stdout; no exception anywhere."""
import logging
import os
import sys
import time

from tqdm import tqdm

RANK = int(os.environ["RANK"])
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
log = logging.getLogger("megatron.data")


def verify(shard):
    return not (RANK == 0 and shard == 7)


def main():
    sys.stderr.write("huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...\n")
    bad = 0
    for shard in tqdm(range(30), desc=f"verify {RANK}", mininterval=0.05):
        if not verify(shard):
            log.critical("checksum of shard_0007.bin is 9f31ac02, index says 5d7711e0")
            bad += 1
        time.sleep(0.05)
    log.info("verified 30 shards")
    if bad:
        log.info("not starting")
        return 1
    time.sleep(20)
    return 0


sys.exit(main())
