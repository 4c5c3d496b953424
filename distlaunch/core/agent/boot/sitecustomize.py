"""Prepare a worker's interpreter before the script runs. ``site`` imports this file.

The file removes its directory from ``sys.path`` and the environment, and itself from
``sys.modules``. Then it runs the next ``sitecustomize``. It must work with Python 3.8 or newer,
import few modules, and never stop a worker.

In the preload server (``_distlaunch_warm.py``) this import never returns. In each worker forked by
the server it returns, and the script runs.
"""

import os
import sys

TYPE_CHECKING = False  # typing is not loaded: a script might see it
if TYPE_CHECKING:
    from typing import Any

_GROUPS = "torch.distributed.distributed_c10d"
"""The module with torch's process groups."""


def _remove_own_folder() -> str:
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


def _enable_faulthandler(number: str) -> None:
    """Enable faulthandler.

    If ``number`` is not empty, it is a descriptor to which faulthandler writes the stacks of all
    threads on a real-time signal.
    """
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
        stderr = getattr(seen, "stderr", None)
        told = stderr or getattr(seen, "output", None)
        if type(seen).__module__ == "subprocess" and isinstance(told, (bytes, str)):
            text = told[-4000:]
            lines = (text if isinstance(text, str) else text.decode("utf-8", "replace")).split("\n")
            lines = [line for line in lines if line.strip()]
            frame = max(
                (n for n, line in enumerate(lines) if line.startswith('  File "')), default=0
            )
            if 0 < frame < len(lines) - 10:  # the exception has a long message
                lines = lines[frame : frame + 7] + lines[-3:]
            shown = [f"| {line.rstrip()[:300]}" for line in lines[-10:]]
            if not shown:
                return
            # A traceback in a note must not look like one of this process.
            heading = "Traceback (most recent call last)"
            where = " to stdout" if stderr is None else ""  # then its stderr is in the log
            note = "\n".join([f"The command wrote{where}:", *shown]).replace(heading, "Traceback")
            seen.add_note(note)  # type: ignore[attr-defined]
            return
        following = seen.__cause__ or seen.__context__
        if following is None:
            return
        seen = following


class _GroupsFinder:
    """Runs ``_distlaunch_groups.py`` when torch's process groups have been imported.

    It stands first on ``sys.meta_path`` until then, and finds nothing itself.
    """

    def __init__(self, path: str, cookie: str) -> None:
        self._path = path
        self._cookie = cookie

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Return the spec of torch's module as other finders give it, which calls ``watch`` after
        the import; None for other modules."""
        if name != _GROUPS:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]  # it is as much of a finder as is needed
        from importlib.util import find_spec

        spec = find_spec(name)
        loader = None if spec is None else spec.loader
        run = getattr(loader, "exec_module", None)
        if run is None:
            return spec

        def exec_module(module: object) -> None:
            run(module)
            self.watch()

        try:
            loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        except AttributeError:
            pass  # an unusual loader: its process groups are not watched
        return spec

    def watch(self) -> None:
        """Start the thread that answers about process groups as soon as there is one. Never raises."""
        try:
            with open(self._path, encoding="utf-8") as file:
                code = compile(file.read(), "<frozen _distlaunch_groups>", "exec")
            space: dict[str, Any] = {"__name__": "_distlaunch_groups"}
            exec(code, space)  # noqa: S102 - our own file
            space["watch"](self._cookie)
        except Exception:  # noqa: BLE001 - the script must not notice
            pass


def _watch_groups(folder: str, cookie: str) -> None:
    """Let the agent ask this worker about its process groups of torch.distributed."""
    finder = _GroupsFinder(os.path.join(folder, "_distlaunch_groups.py"), cookie)
    if _GROUPS in sys.modules:  # preloaded
        finder.watch()
    else:
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]  # it is as much of a finder as is needed


def _run_next_sitecustomize() -> None:
    """Run the next ``sitecustomize``. If there is none, raise the same ImportError as without this
    file."""
    del sys.modules["sitecustomize"]
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401 - another: this folder is off the path


_control = os.environ.pop("DISTLAUNCH_WARM_FD", "")
try:
    _folder = _remove_own_folder()
    _stacks = os.environ.pop("DISTLAUNCH_STACKS_FD", "")
    if _control:
        _serve(_folder, _control)
    _enable_faulthandler(_stacks)
    if sys.version_info >= (3, 11):  # older versions show no notes
        _show_captured_errors()

    if _stacks and os.environ.get("DISTLAUNCH_COOKIE"):
        _watch_groups(_folder, os.environ["DISTLAUNCH_COOKIE"])
except Exception as exc:  # noqa: BLE001 - the worker must run in any case
    sys.stderr.write(f"distlaunch: warning: the worker's bootstrap failed: {exc!r}\n")
    if _control:  # but a server that failed must not run the script
        os._exit(70)
_run_next_sitecustomize()
