"""Write the time of the first instruction, and sleep until SIGTERM ends the process."""

import os
import signal

import common

common.stamp("pid", os.getpid())
common.stamp("start", common.STARTED_NS)
signal.pause()
