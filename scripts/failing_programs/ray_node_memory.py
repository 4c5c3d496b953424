# workers: 2
# expect-rank: 0
# expect-exit: 1
# expect-cause: OutOfMemoryError
# expect-cause: node running low on memory
# expect-hint: host memory | RAM | memory of the node | memory on the node
# misleads: GPU memory
"""The driver on rank 0 gets Ray's error for a task that the memory monitor of the node has killed."""
import os
import time

RANK = int(os.environ["RANK"])


class OutOfMemoryError(Exception):
    pass


OutOfMemoryError.__module__ = "ray.exceptions"

TEXT = """Task was killed due to the node running low on memory.
Memory on the node (IP: 172.31.69.247, ID: 5bf8d24f68a4b2f966b34cb94a41d1a312f406dc9081063ea7dd661b) where the task (task ID: 41617bc740ae9ca27726b37f8578c02f4cf1698d01000000, name=build_replay, pid=548, memory used=12.18GB) was running was 54.86GB / 57.60GB (0.952354), which exceeds the memory usage threshold of 0.95. Ray killed this worker (ID: 0f7695fad1848c8703eb36240efa3a80cb82ea43206919f4) because it was the most recently scheduled task; to see more information about memory usage on this node, use `ray logs raylet.out -ip 172.31.69.247`. To see the logs of the worker, use `ray logs worker-0f7695fad1848c8703eb36240efa3a80cb82ea43206919f4*out -ip 172.31.69.247. Top 10 memory users:
PID	MEM(GB)	COMMAND
548	12.18	ray::build_replay
511	11.90	ray::build_replay
1134	4.52	ray::IDLE
88	0.09	/home/ray/anaconda3/bin/python /home/ray/anaconda3/bin/tensorboard
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html. Consider provisioning more memory on this node or reducing task parallelism by requesting more CPUs per task. To adjust the kill threshold, set the environment variable `RAY_memory_usage_threshold` when starting Ray. To disable worker killing, set the environment variable `RAY_memory_monitor_refresh_ms` to zero."""


def get(reference):
    time.sleep(0.8)
    raise OutOfMemoryError(TEXT)


def main():
    print(f"[{RANK}] (raylet) spilled 20480 MiB, 14 objects, write throughput 812 MiB/s", flush=True)
    if RANK == 0:
        get("ObjectRef(41617bc740ae9ca2)")
    time.sleep(20)


main()
