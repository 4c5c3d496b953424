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
except Exception as exc:  # noqa: BLE001 - the worker must run in any case
    sys.stderr.write(f"distlaunch: warning: the worker's bootstrap failed: {exc!r}\n")
    if _control:  # but a server that failed must not run the script
        os._exit(70)
_chain()
