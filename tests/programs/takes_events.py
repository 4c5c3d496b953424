"""Append each event and the variables of ours to the file ``taken``: ``takes_events.py [hold]``. With hold, wait for ever after the first."""

import json
import os
import sys
import time

event = json.load(sys.stdin)
variables = {name: value for name, value in os.environ.items() if name.startswith("DISTLAUNCH_")}
with open("taken", "a") as file:
    file.write(json.dumps({"event": event, "variables": variables}) + "\n")
if "hold" in sys.argv:
    import survivor

    survivor.hold()
    time.sleep(3600)
