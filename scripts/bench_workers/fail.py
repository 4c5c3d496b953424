"""In the first attempt rank 1 exits with 3 once all are up, the others wait to be stopped; later
attempts end well."""

import os
import signal
import time

import common

common.stamp("start", common.STARTED_NS)
if common.ATTEMPT == 0:
    if common.RANK != 1:
        signal.pause()
    common.wait_for_all()
    time.sleep(0.3)  # let the launcher come to rest: what is measured is its reaction
    common.stamp("fail", time.monotonic_ns())
    os._exit(3)
