"""A module whose import takes for ever (see ``hanging.py``)."""

import time

time.sleep(1000)
