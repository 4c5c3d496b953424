"""Say when the first instruction ran, and end."""

import common

common.stamp("start", common.STARTED_NS)
