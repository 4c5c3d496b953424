# workers: 3
# expect-rank: 1
# expect-exit: 17
# expect-cause: SchemaError
# expect-cause: column 'attention_mask'
# expect-frame: collate
# misleads: shutdown requested
"""A service logs JSON lines only, on stdout; the exception is a field; the library ends by os._exit(17)."""
import json
import os
import sys
import time
import traceback

RANK = int(os.environ["RANK"])


class SchemaError(Exception):
    pass


def log(level, event, **fields):
    record = {"event": event, "level": level, "logger": "trainer.loop", "rank": RANK, "timestamp": "2026-11-02T09:14:55.201933Z", **fields}
    print(json.dumps(record), flush=True)


def collate(rows):
    for row in rows:
        if "attention_mask" not in row:
            raise SchemaError(f"row {row['id']}: column 'attention_mask' is missing (columns: {sorted(row)})")


def step(number):
    rows = [{"id": number * 4 + k, "input_ids": [1, 2], "attention_mask": [1, 1]} for k in range(4)]
    if RANK == 1 and number == 6:
        del rows[2]["attention_mask"]
    collate(rows)


def main():
    log("info", "start", world_size=int(os.environ["WORLD_SIZE"]))
    for number in range(10):
        try:
            step(number)
        except SchemaError as error:
            log("error", "unhandled exception in step", step=number, exception=traceback.format_exc(), exc_type=type(error).__name__)
            log("info", "flushing metrics", pending=12)
            log("info", "shutdown requested", reason="exception")
            os._exit(17)
        log("info", "step", step=number, loss=round(3.1 - number * 0.1, 3))
    time.sleep(30)


main()
