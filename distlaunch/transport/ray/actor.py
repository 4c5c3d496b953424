"""The actor class that runs on Ray's nodes. Ray pickles it by value, so it imports only the
standard library."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any


class AgentActor:
    """An actor in one bundle. It reports its GPUs, and can start the node's agent and carry the
    agent's bytes."""

    def __init__(self) -> None:
        self._agent: Any = None
        self._stderr = b""
        self._rest = b""

    def devices(self) -> tuple[str, list[str]]:
        """Return the id of the node, and the ids of this bundle's GPUs as in a device mask."""
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), [
            str(each) for each in context.get_accelerator_ids().get("GPU", ())
        ]

    def start(
        self, argv: list[str], code: bytes, greeting: bytes, mask: list[str], within_s: float
    ) -> str | None:
        """Start the agent and wait at most ``within_s`` seconds for its greeting. Return the
        problem, if any.

        ``mask`` are the ids of the GPUs for the device mask; without any, the mask is not set.
        """
        # Ray sets OMP_NUM_THREADS by the CPUs of this actor alone.
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environ["PATH"] = (
            os.path.dirname(sys.executable) + os.pathsep + environ.get("PATH", os.defpath)
        )
        if mask:
            names = [
                name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in environ
            ]
            environ.update(dict.fromkeys(names or ["CUDA_VISIBLE_DEVICES"], ",".join(mask)))
        pipe = subprocess.PIPE
        self._agent = subprocess.Popen(
            [sys.executable, *argv],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=environ,
            start_new_session=True,
        )
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()
        threading.Thread(target=self._send_code, args=(code,), daemon=True).start()
        until = time.monotonic() + within_s
        received = b""
        while (at := received.find(greeting)) < 0:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return "the agent did not start in time"
            data = self.read(1 << 16, min(left_s, 1.0))
            if data is None:
                return f"the agent failed to start: {self._end_text()}"
            received += data
        self._rest = received[at + len(greeting) :]
        return None

    def _send_code(self, code: bytes) -> None:
        with suppress(OSError):  # the reader sees the end
            self.write(code)

    def _read_stderr(self) -> None:
        """Read the agent's stderr to its end. Store only the last bytes."""
        while data := os.read(self._agent.stderr.fileno(), 1 << 16):
            self._stderr = (self._stderr + data)[-4096:]
        self._agent.wait()  # no zombie is left

    def read(self, most: int, within_s: float) -> bytes | None:
        """Return at most ``most`` bytes of the agent's stdout; b"" after ``within_s`` seconds
        without data; None at its end."""
        if self._rest:
            rest, self._rest = self._rest, b""
            return rest
        stream = self._agent.stdout.fileno()
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        if not poll.poll(within_s * 1000):
            return b""
        return os.read(stream, most) or None

    def write(self, data: bytes) -> None:
        """Send all bytes to the agent. Raises OSError if it has ended."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._agent.stdin.fileno(), left) :]

    def end(self) -> tuple[int | None, str]:
        """Return the agent's exit code (negative for a signal), and its last line of stderr.

        Waits up to 2 s for the agent; the code is None if it still runs.
        """
        try:
            code = self._agent.wait(2.0)
        except subprocess.TimeoutExpired:
            code = None
        else:
            self._stderr_reader.join(1.0)  # another process may have stderr open for longer
        lines = [
            line.strip()
            for line in self._stderr.decode(errors="replace").splitlines()
            if line.strip()
        ]
        return code, lines[-1][:200] if lines else ""

    def _end_text(self) -> str:
        code, line = self.end()
        if code is None:
            return "it closed its output"
        how = f"it was killed by signal {-code}" if code < 0 else f"it ended with status {code}"
        return f"{how}: {line}" if line else how

    def stop(self, within_s: float) -> None:
        """Close the agent's stdin, so that it stops its workers and exits. Wait at most
        ``within_s`` seconds."""
        if self._agent is None:
            return
        with suppress(OSError):
            self._agent.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._agent.wait(within_s)
