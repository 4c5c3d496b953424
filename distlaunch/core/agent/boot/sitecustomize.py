"""Prepare a worker's interpreter before the script runs. ``site`` imports this file.

The file removes its directory from ``sys.path`` and the environment, and itself from
``sys.modules``. Then it runs the next ``sitecustomize``. It must work with Python 3.8 or newer,
import few modules, and never stop a worker.

In the preload server (``_distlaunch_warm.py``) this import never returns. In each worker forked by
the server it returns, and the script runs.
"""

import os
import sys


def _leave() -> str:
    """Remove this directory from ``sys.path`` and the environment, and return it."""
    folder = os.environ.pop("DISTLAUNCH_BOOT", os.path.dirname(os.path.abspath(__file__)))
    rest = os.environ.get("PYTHONPATH", "")
    if rest == folder:
        del os.environ["PYTHONPATH"]
    elif rest.startswith(folder + os.pathsep):
        os.environ["PYTHONPATH"] = rest[len(folder) + 1 :]
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.path_importer_cache.pop(folder, None)
    return folder


def _serve(folder: str, control: str) -> None:
    """Run the preload server. Returns only in a worker."""
    sys.path.insert(0, folder)
    try:
        from _distlaunch_warm import serve  # type: ignore[import-not-found]
    finally:
        sys.path.remove(folder)
        sys.path_importer_cache.pop(folder, None)
        for name in ("_distlaunch_warm", "_distlaunch_worker"):
            sys.modules.pop(name, None)
    serve(int(control))


def _arm(number: str) -> None:
    """Make faulthandler write the stacks of all threads to this descriptor on a real-time signal.
    Empty: do nothing."""
    import faulthandler

    if not faulthandler.is_enabled() and sys.stderr is not None:
        faulthandler.enable()
    if number:
        import _signal  # type: ignore[import-not-found]

        os.set_inheritable(int(number), False)  # noqa: FBT003 - positional-only in the standard library
        faulthandler.register(_signal.SIGRTMAX - 3, file=int(number), all_threads=True)


def _show_captured_errors() -> None:
    """Let a traceback show what a failed command wrote to a stderr that the script captured.

    ``subprocess.run(..., check=True, capture_output=True)`` holds these lines in the exception
    only. They are added to it as a note before Python prints the traceback.
    """
    show = sys.excepthook

    def hook(kind: "type[BaseException]", exception: BaseException, trace: object) -> None:
        try:
            _note_captured_errors(exception)
        finally:
            show(kind, exception, trace)  # type: ignore[arg-type]

    sys.excepthook = hook


def _note_captured_errors(exception: BaseException) -> None:
    """Add the last lines of a failed command's stderr as a note to its CalledProcessError."""
    seen = exception
    for _ in range(8):
        told = getattr(seen, "stderr", None) or getattr(seen, "output", None)
        if type(seen).__module__ == "subprocess" and isinstance(told, (bytes, str)):
            text = told[-4000:]
            lines = (text if isinstance(text, str) else text.decode("utf-8", "replace")).split("\n")
            shown = [f"| {line.rstrip()[:300]}" for line in lines if line.strip()][-10:]
            # A traceback in a note must not look like one of this process.
            heading = "Traceback (most recent call last)"
            note = "\n".join(["The command wrote:", *shown]).replace(heading, "Traceback")
            seen.add_note(note)  # type: ignore[attr-defined]
            return
        following = seen.__cause__ or seen.__context__
        if following is None:
            return
        seen = following


def _chain() -> None:
    """Run the next ``sitecustomize``. If there is none, raise the same ImportError as without this
    file."""
    del sys.modules["sitecustomize"]
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401 - another: this folder is off the path


_control = os.environ.pop("DISTLAUNCH_WARM_FD", "")
try:
    _folder = _leave()
    _stacks = os.environ.pop("DISTLAUNCH_STACKS_FD", "")
    if _control:
        _serve(_folder, _control)
    _arm(_stacks)
    if sys.version_info >= (3, 11):  # older versions show no notes
        _show_captured_errors()
except Exception as exc:  # noqa: BLE001 - the worker must run in any case
    sys.stderr.write(f"distlaunch: warning: the worker's bootstrap failed: {exc!r}\n")
    if _control:  # but a server that failed must not run the script
        os._exit(70)
_chain()
