# workers: 4
# expect-rank: 3
# expect-exit: 1
# expect-cause: PanicException
# expect-cause: AddedVocabulary bad split
# expect-frame: encode
"""A Rust tokenizer panics on one text; its binding raises a BaseException."""
import os
import sys
import time

RANK = int(os.environ["RANK"])


class PanicException(BaseException):
    pass


PanicException.__module__ = "pyo3_runtime"


def encode(text):
    if "\u0000" in text:
        sys.stderr.write(
            "thread '<unnamed>' panicked at /home/runner/work/tokenizers/tokenizers/tokenizers/src/tokenizer/added_vocabulary.rs:428:22:\n"
            "AddedVocabulary bad split\n"
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n"
        )
        raise PanicException("AddedVocabulary bad split")
    return [ord(char) for char in text]


def main():
    try:
        for index in range(60):
            encode("a\u0000b" if RANK == 3 and index == 12 else "eine Zeile Text")
            time.sleep(0.03)
    except Exception as error:  # does not catch a panic
        print("skipping", error)
    time.sleep(20)


main()
