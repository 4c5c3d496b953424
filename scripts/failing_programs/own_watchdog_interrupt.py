# workers: 3
# expect-rank: 2
# expect-exit: 1,130
# expect-cause: no optimizer step for
# expect-frame: wait_for_reward_model
# misleads: from outside
# misleads: Ctrl-C
"""The script's own watchdog thread interrupts the main thread; no user and no scheduler did."""
import _thread
import os
import sys
import threading
import time

RANK = int(os.environ["RANK"])


class Watchdog(threading.Thread):
    def __init__(self, limit):
        super().__init__(daemon=True, name="watchdog")
        self.limit, self.last = limit, time.monotonic()

    def run(self):
        while time.monotonic() - self.last < self.limit:
            time.sleep(0.05)
        sys.stderr.write(f"[watchdog] rank {RANK}: no optimizer step for {self.limit:g} s (reward model at 10.0.4.9:8800 does not answer), interrupting\n")
        sys.stderr.flush()
        _thread.interrupt_main()


def wait_for_reward_model():
    for _ in range(400):
        time.sleep(0.05)


def main():
    dog = Watchdog(1.5)
    dog.start()
    for step in range(300):
        dog.last = time.monotonic()
        if RANK == 2 and step == 3:
            wait_for_reward_model()
        print(f"ppo step {step} kl 0.0{step % 7}", flush=True)
        time.sleep(0.2)


main()
