# expect-rank: 3
# expect-exit: 1
# expect-cause: RuntimeError: cannot resume
# expect-original: FileNotFoundError
# expect-frame: chained_exceptions.py:20 in resume
"""raise … from: the outermost and the original exception are both named."""

from _group import RANK, sleep_until_stopped


def read() -> str:
    with open("/nonexistent/checkpoint.pt") as file:
        return file.read()


def resume() -> None:
    try:
        read()
    except OSError as exc:
        raise RuntimeError("cannot resume") from exc


if RANK == 3:
    resume()
sleep_until_stopped()
