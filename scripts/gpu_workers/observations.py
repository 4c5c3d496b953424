"""Print observations of the GPU check's programs as one line of JSON."""

import json


def report(**seen: object) -> None:
    """Print the values; a dtype or a device by its name."""
    print("observed", json.dumps(seen, default=str), flush=True)
