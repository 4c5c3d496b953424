# workers: 3
# expect-rank: 0
# expect-exit: 1
# expect-cause: zlib.error
# expect-cause: incorrect header check
# expect-frame: _decode
# misleads: queue.Empty
# misleads: Empty
"""The thread that fills the queue dies of a broken record; 4 s later the main thread finds it empty."""
import os
import queue
import threading
import time
import zlib

RANK = int(os.environ["RANK"])


def _decode(blob):
    return zlib.decompress(blob)


def _prefetch(out):
    for index in range(1000):
        blob = zlib.compress(b"x" * 100)
        if RANK == 0 and index == 30:
            blob = b"<html>502 Bad Gateway</html>"
        out.put(_decode(blob))


def batches(source):
    while True:
        yield source.get(timeout=4)


def main():
    source = queue.Queue(maxsize=8)
    threading.Thread(target=_prefetch, args=(source,), name="prefetch-0", daemon=True).start()
    for step, batch in enumerate(batches(source)):
        if step % 10 == 0:
            print(f"step {step} bytes {len(batch)}", flush=True)
        time.sleep(0.05)


main()
