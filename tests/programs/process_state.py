"""Put up ``process-<rank>``: descriptors, signals, session, limits and arguments of this worker, as JSON. Then end with 0."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from signs import sign

descriptors = {}
for name in os.listdir("/proc/self/fd"):
    try:
        descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        continue  # that of the listing
with open("/proc/self/status") as file:
    status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
with open("/proc/self/cmdline", "rb") as file:
    cmdline = file.read().hex()
reported = {
    "pid": os.getpid(),
    "session": os.getsid(0),
    "group": os.getpgid(0),
    "descriptors": descriptors,
    "blocked": status["SigBlk"],
    "ignored": status["SigIgn"],
    "handlers": {str(int(number)): repr(signal.getsignal(number)) for number in signal.valid_signals()},
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
    "cwd": os.getcwd(),
    "cmdline": cmdline,
    "argv": [os.fsencode(word).hex() for word in sys.argv[1:]],
    "affinity": sorted(os.sched_getaffinity(0)),
    "umask": os.umask(0o22),
    "env": {name: os.fsencode(value).hex() for name, value in os.environ.items()},
}
sign(f"process-{os.environ['RANK']}", json.dumps(reported))
