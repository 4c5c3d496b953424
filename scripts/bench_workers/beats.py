"""Report a step each second, and use no other processor time, until SIGTERM."""

import os
import time

import common

pipe = int(os.environ["DISTLAUNCH_PROGRESS_FD"])
common.stamp("pid", os.getpid())
common.stamp("start", common.STARTED_NS)
step = 0
while True:
    step += 1
    os.write(pipe, b'{"step": %d, "loss": 0.5}\n' % step)
    time.sleep(1.0)
