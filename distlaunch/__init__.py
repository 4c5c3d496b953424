"""distlaunch: start, watch, explain and restart distributed training jobs."""

__version__ = "0.1.0"


def _is_command() -> bool:
    """Return whether this process runs the ``distlaunch`` command, and is not a program that
    imports the package."""
    import sys

    if sys.argv[:1] == ["-m"]:  # while the interpreter still looks for the module of ``-m``
        words = sys.orig_argv
        return "-m" in words and words[words.index("-m") + 1 :][:1] == ["distlaunch"]
    return sys.argv[:1] != [] and sys.argv[0].rpartition("/")[2] == "distlaunch"


def _end_at_interrupt() -> None:
    """Make Ctrl-C end this process silently with exit code 130.

    Called before anything has begun that would need a cleanup.
    """
    import _signal  # type: ignore[import-not-found]  # built in; signal itself takes milliseconds
    import os

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))


if _is_command():
    # here, since Python shows a traceback for a Ctrl-C while it imports the rest
    _end_at_interrupt()
