# workers: 3
# expect-rank: 2
# expect-exit: 1
# expect-cause: JSONDecodeError
# expect-cause: Expecting ',' delimiter
# expect-frame: parse_line
"""A pool of processes parses JSON lines; the parent wraps the error in one that says nothing."""
import json
import multiprocessing
import os
import time

RANK = int(os.environ["RANK"])


def parse_line(line):
    return json.loads(line)["text"]


def parse_file(index):
    good = '{"id": 1, "text": "a"}'
    bad = '{"id": 2 "text": "b"}'
    return [parse_line(line) for line in ([good, bad] if RANK == 2 and index == 1 else [good, good])]


def preprocess():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        try:
            return pool.map(parse_file, range(4))
        except Exception as error:
            raise RuntimeError("preprocessing failed, see above") from error


if __name__ == "__main__":
    preprocess()
    time.sleep(20)
