"""Preloading in the agent: write the output of the imports to a file, and report the result."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from distlaunch.core.agent.workers.deadline import FILES_S, run_with_timeout
from distlaunch.core.model.text import counted
from distlaunch.core.private_files import open_private
from distlaunch.core.protocol import agent_messages as m
from distlaunch.core.protocol import spawner_messages as w

_SHOWN_LINES = 20
_SHOWN_BYTES = 4 << 10
_READ_BYTES = 1 << 20
_WARNING_MARKS = ("Warning", "Error", "warning:", "error:")
"""Output with one of these words is shown as a warning, even in quiet modes."""
_NEW = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class PreloadReport:
    """Follows a preload server from its start to its end."""

    def __init__(self, send: Callable[[m.FromAgent], None], clock: Callable[[], float]) -> None:
        self._send = send
        self._clock = clock
        self._output = -1
        self._modules: tuple[str, ...] = ()
        self._left_out: tuple[str, ...] = ()
        self._path = ""
        self._began = 0.0

    def begin(self, start: m.Start) -> tuple[w.Preload, int]:
        """Return the order for the spawner, and the descriptor for the imports' output. Raises
        OSError."""
        self._modules, self._path, self._began = start.preload, start.preload_log, self._clock()
        self._left_out = ()
        try:
            self._output = run_with_timeout(FILES_S, lambda: open_private(start.preload_log, _NEW))
        except OSError:  # the run directory is gone, which the workers' log files report
            self._path = ""
            self._output = os.memfd_create("preload")
        # Libraries read this variable on import, and it is the same for all ranks.
        env = {
            name: value for name, value in start.workers[0].env.items() if name == "OMP_NUM_THREADS"
        }
        order = w.Preload(
            modules=start.preload, argv=start.argv, env=env, bound_s=start.preload_bound_s
        )
        return order, os.dup(self._output)

    def on_message(
        self, message: w.StillPreloading | w.ModuleLeftOut | w.Preloaded | w.PreloadFailed
    ) -> None:
        """Report a slow import, a module that is left out, or the result of preloading with the
        output of the imports."""
        if isinstance(message, w.StillPreloading):
            what = (
                f"still importing {message.module}"
                if message.module
                else "the workers' interpreter has not begun"
            )
            self._notify(f"preload: {what}, after {message.elapsed_s:.0f} s", warning=True)
            return
        if isinstance(message, w.ModuleLeftOut):
            self._left_out += (message.module,)
            self._modules = tuple(name for name in self._modules if name != message.module)
            self._notify(
                f"preload: {message.reason}; {message.module} is left out, and workers import it "
                "themselves",
                warning=True,
            )
            return
        self._show_output()
        reason = message.reason if isinstance(message, w.PreloadFailed) else None
        elapsed_s = self._clock() - self._began
        self._send(
            m.PreloadEnded(
                modules=self._modules, problem=reason, elapsed_s=elapsed_s, left_out=self._left_out
            )
        )
        if reason is not None:
            self._notify(f"preload: {reason}; workers start without preloading", warning=True)

    def _show_output(self) -> None:
        """Send the first lines of the imports' output as a notice. Delete an empty file."""
        if self._output < 0:
            return
        data = os.pread(self._output, _READ_BYTES, 0)
        size = os.fstat(self._output).st_size
        self.close()
        if size == 0:
            with suppress(OSError):
                os.unlink(self._path)
        output = data.decode("utf-8", "replace").strip()
        if not output:
            return
        shown = output[:_SHOWN_BYTES].split("\n")[:_SHOWN_LINES]
        more = output.count("\n") + 1 - len(shown)
        if size > _READ_BYTES or more or len(output) > _SHOWN_BYTES:
            left = f"{counted(more, 'more line')}" if size <= _READ_BYTES and more else "more"
            shown.append(f"... {left}{f' in {self._path}' if self._path else ''}")
        self._notify(
            "while preloading: " + "\n  ".join(shown),
            warning=any(mark in output for mark in _WARNING_MARKS),
        )

    def _notify(self, text: str, *, warning: bool) -> None:
        self._send(m.AgentNotice(text=text, warning=warning))

    def close(self) -> None:
        """Close the output file."""
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
