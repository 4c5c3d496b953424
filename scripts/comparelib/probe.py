"""Record what a worker sees, as JSON in $PROBE_OUT, and do what $PROBE_DO says."""

import json
import os
import signal
import sys
import time

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
do = os.environ.get("PROBE_DO", "")
seen = {
    "argv": sys.argv,
    "name": __name__,
    "cwd": os.getcwd(),
    "env": dict(os.environ),
    "stdin": sys.stdin.read() if do == "read" else None,
    "unbuffered": sys.stdout.write_through,
    "affinity": len(os.sched_getaffinity(0)),
}
print(f"out {rank}", flush=True)
print(f"err {rank}", file=sys.stderr, flush=True)
place = os.path.join(os.environ["PROBE_OUT"], f"{attempt}-{{}}.json")
with open(place.format(f"{rank}.new"), "w", encoding="utf-8") as file:
    json.dump(seen, file)
os.rename(file.name, place.format(rank))
deadline = time.monotonic() + 30
while do and not all(
    os.path.exists(place.format(other)) for other in range(int(os.environ["WORLD_SIZE"]))
):
    if (
        time.monotonic() > deadline
    ):  # who fails waits for the others' words, which a stop would cut off
        sys.exit("the other workers have not come")
    time.sleep(0.005)
if do == "exit" and rank == 0:
    sys.exit(37)
if do == "raise" and rank == 0:
    raise ValueError("a bad batch")
if do == "kill" and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if (do == "first" and attempt == 0) or do == "always":
    sys.exit(5 + attempt)
if do == "record":
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main() -> None:
        raise KeyError("recorded")

    main()
