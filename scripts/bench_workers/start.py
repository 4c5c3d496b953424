"""Write the time of the first instruction, and end."""

import common

common.stamp("start", common.STARTED_NS)
