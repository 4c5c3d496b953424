"""Fail in every attempt but the last: how a launcher stands a hundred restarts."""

import os
import sys
import time

import common

common.stamp("start", common.STARTED_NS)
if int(sys.argv[1]) > common.ATTEMPT:
    if common.RANK == 1:
        common.wait_for_all()
        os._exit(3)
    time.sleep(60)
