# workers: 4
# expect-rank: 2
# expect-exit: 1
# expect-cause: UnicodeDecodeError
# expect-cause: can't decode byte 0xe9
# expect-frame: read_captions
# expect-hint: encod
"""The log handler prefixes every line of a traceback; the message of the exit is of no use."""
import logging
import os
import sys
import time

RANK = int(os.environ["RANK"])


class PerLine(logging.StreamHandler):
    """Write each line of a record with its own time and level, as log shippers want it."""

    def emit(self, record):
        text = self.format(record)
        for line in text.splitlines():
            self.stream.write(f"{time.strftime('%m/%d %H:%M:%S')} [{RANK}] {record.levelname[0]} clip.train: {line}\n")
        self.flush()


log = logging.getLogger("clip.train")
log.addHandler(PerLine(sys.stderr))
log.setLevel(logging.INFO)


def read_captions(path):
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def run():
    path = f"captions-{RANK}.tsv"
    with open(path, "wb") as file:
        file.write(b"1\tune chaise\n2\tun caf\xe9 noir\n" if RANK == 2 else b"1\ta chair\n")
    log.info("reading %s", path)
    captions = read_captions(path)
    log.info("%d captions", len(captions))
    time.sleep(20)


try:
    run()
except Exception:
    log.exception("Training failed")
    log.info("cleaning up temporary directories")
    log.info("bye")
    raise SystemExit(1) from None
