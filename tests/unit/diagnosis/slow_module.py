"""A module whose import never ends (see ``hanging.py``)."""

import time

time.sleep(1000)
