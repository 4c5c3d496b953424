# workers: 4
# expect-rank: 3
# expect-cause: heartbeat | Heartbeat | watchdog | last enqueued
# expect-frame: stage_shards
# expect-hint: blocked | stuck | rank 3
# misleads: in the same order
"""Three ranks' heartbeat monitors kill them; rank 3 holds the GIL in a copy to a dead file server.

Nothing on ranks 0 to 2 is wrong: they have enqueued work 1740, rank 3 stands in stage_shards.
"""
import os
import signal
import sys
import time

RANK = int(os.environ["RANK"])


def stage_shards(source):
    print(f"INFO:staging:copy {source} -> /local_scratch", flush=True)
    open("staging", "w").close()
    time.sleep(50)


def say(text):
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def heartbeat_monitor():
    pg = f"[PG 0 Rank {RANK}]"
    say(f"[rank{RANK}]:[E ProcessGroupNCCL.cpp:1316] {pg} Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=2")
    say(f"[rank{RANK}]:[E ProcessGroupNCCL.cpp:1153] {pg} ProcessGroupNCCL preparing to dump debug info.")
    say(
        f"[rank{RANK}]:[F ProcessGroupNCCL.cpp:1169] {pg} {pg} ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives. "
        "This typically indicates a NCCL/CUDA API hang blocking the watchdog, and could be triggered by another thread holding the GIL inside a CUDA api, or other deadlock-prone behaviors."
        "If you suspect the watchdog is not actually stuck and a longer timeout would help, you can either increase the timeout (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC) to a larger value or disable the heartbeat monitor (TORCH_NCCL_ENABLE_MONITORING=0)."
        "If either of aforementioned helps, feel free to file an issue to PyTorch about the short timeout or false positive abort; otherwise, please attempt to debug the hang. workMetaList_.size() = 2"
    )
    os.kill(os.getpid(), signal.SIGABRT)


def main():
    for step in range(3):
        say(f"  {step + 1}/100 [00:0{step}<01:12,  1.33it/s, v_num=0]")
    if RANK == 3:
        stage_shards("/mnt/weka/c4/shard-00931.tar")
        return
    while not os.path.exists("staging"):
        time.sleep(0.05)
    time.sleep(1.0)
    heartbeat_monitor()


main()
