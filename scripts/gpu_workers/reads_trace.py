"""Read a dump of NCCL's flight recorder with torch's own reader: ``reads_trace.py PREFIX FILE``."""

import sys

from observations import report
from torch.distributed.flight_recorder.components.loader import read_dump

dump = read_dump(*sys.argv[1:3])
entries = dump["entries"]
report(
    version=dump["version"],
    rank=dump["rank"],
    entries=[entry["profiling_name"] for entry in entries],
)
