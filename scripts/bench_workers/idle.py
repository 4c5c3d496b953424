"""Say when the first instruction ran, and sleep until told to stop (by the default action of
SIGTERM)."""

import os
import signal

import common

common.stamp("pid", os.getpid())
common.stamp("start", common.STARTED_NS)
signal.pause()
