# expect-rank: 1
# expect-exit: 1
# expect-cause: UnicodeError: label file is not text
"""The error file is garbage: the traceback on stderr still tells."""

import os

from _group import RANK, sleep_until_stopped

if RANK == 1:
    with open(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull), "wb") as file:
        file.write(b'{"message": {"message": ["\xff\x00", {"extraInfo": 3}' + b"[" * 5000)
    raise UnicodeError("label file is not text")
sleep_until_stopped()
