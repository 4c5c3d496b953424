"""Print host, directory, arguments and variables as one line of JSON; the variables of $ASK, too."""

import json
import os
import sys

NAMES = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
]
message = {name: os.environ.get(name) for name in [*NAMES, *os.environ.get("ASK", "").split()]}
print(json.dumps({"host": os.uname().nodename, "cwd": os.getcwd(), "argv": sys.argv[1:], **message}), flush=True)
