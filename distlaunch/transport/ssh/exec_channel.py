"""An agent's byte stream through one channel of a paramiko connection.

paramiko's buffers are replaced. Its ``fileno`` can miss data if stdout and stderr arrive at the
same time (two locks, one pipe). Its ``recv`` sends window adjustments, which may block on the
network; the main loop must not block.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from distlaunch.core.model.record import replace
from distlaunch.core.model.text import printable
from distlaunch.transport.bootstrap import clause_of_last_lines
from distlaunch.transport.cleanup import wait_budget
from distlaunch.transport.connection import ConnectionEnd, EndKind

if TYPE_CHECKING:
    import paramiko

    from distlaunch.transport.ssh.packets import Packets

WINDOW = 4 << 20
PACKET = 1 << 15
_GRANT = WINDOW // 8
_MOST_KEPT = 2 * WINDOW
_LOOK_AGAIN_S = 1.0
_MOST_TAKEN = 1 << 19
_STDERR_TAIL = 16 << 10
# Messages of channels (RFC 4254).
_ADJUST, _EOF, _CLOSE, _REQUEST = 93, 96, 97, 98


class ChannelConnection:
    """A connection to an agent through the channel of an SSH session."""

    def __init__(
        self, channel: paramiko.Channel, stream: ByteStream, close_connection: Callable[[], None]
    ) -> None:
        self._channel: Any = channel
        channel.settimeout(_LOOK_AGAIN_S)
        self._transport: Any = channel.get_transport()
        self._stream = stream
        self._close_connection = close_connection
        self._buffer = ReceiveBuffer()
        # the part of BufferedPipe that paramiko uses
        channel.in_buffer = self._buffer  # type: ignore[assignment]
        channel.in_stderr_buffer = StderrBuffer(self._buffer)  # type: ignore[assignment]  # same
        self._sending = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._end: ConnectionEnd | None = None

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._buffer.fileno()

    def receive(self) -> bytes | None:
        """Return the bytes that have arrived, perhaps none; None after the end."""
        if self._closed:
            return None
        data = self._buffer.take()
        self._adjust_window()
        return data

    def _adjust_window(self) -> None:
        """Allow the other end to send as many bytes as were received, unless sending this would
        block.

        Then a later call does it: with the next bytes in either direction, or within a second if a
        thread waits to send.
        """
        if self._buffer.needs_window():
            size = self._buffer.take_window()
            if not self._send_now(self._channel_message(_ADJUST, size)):
                self._buffer.take_window(back=size)

    def _channel_message(self, kind: int, *numbers: int) -> Any:
        from paramiko.message import Message

        message = Message()
        message.add_byte(bytes((kind,)))
        for number in (self._channel.remote_chanid, *numbers):
            message.add_int(number)
        return message

    def _send_now(self, *messages: Any) -> bool:
        packets: Packets = self._transport.packetizer
        try:
            return packets.send_now(list(messages), may=self._can_send)
        except (EOFError, OSError):
            return False  # it is closed; the next ``receive`` returns the end

    def _can_send(self) -> bool:
        # Nothing else may be sent during a key exchange, which begins with a packet and so cannot
        # begin meanwhile.
        return (
            self._transport.is_active()
            and self._transport.clear_to_send.is_set()
            and self._stream.can_write()
        )

    def unread(self, data: bytes) -> None:
        """Put bytes back, for the next ``receive``. ``fileno`` becomes readable."""
        self._buffer.unread(data)

    def execute(self, command: str) -> None:
        """Request the execution of a command without waiting for the answer.

        A refusal closes the channel. Raises OSError.
        """
        message = self._channel_message(_REQUEST)
        message.add_string("exec")
        message.add_boolean(True)  # noqa: FBT003 - paramiko's
        message.add_string(command)
        try:
            self._transport._send_user_message(message)  # noqa: SLF001 - what Channel itself calls
        except (
            Exception
        ) as exc:  # paramiko raises EOFError, SSHException or OSError for a closed connection
            raise OSError(f"the connection is closed: {exc}") from exc

    def send(self, data: bytes) -> None:
        """Send all bytes. Blocks while the network is busy. Raises OSError if the connection is
        closed."""
        with self._sending:
            at = 0
            while at < len(data):
                try:
                    sent = self._channel.send(data[at : at + PACKET])
                except TimeoutError:
                    sent = 0  # the window is full
                # As above, for a closed connection.
                except Exception as exc:
                    raise OSError(f"the connection is closed: {exc}") from exc
                if not sent and (self._channel.closed or not self._transport.is_active()):
                    raise OSError("the connection is closed")
                at += sent
                self._adjust_window()

    def stderr_tail(self) -> bytes:
        """Return the last bytes of stderr that have arrived."""
        return bytes(self._buffer.stderr)

    def close(self) -> None:
        """Close channel and connection without waiting. Can be called again."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._end = self._end or self._find_end(lambda _: None)
        if not self._channel.closed:
            self._send_now(self._channel_message(_EOF), self._channel_message(_CLOSE))
        self._close_connection()
        self._buffer.release()

    def clear_stderr(self) -> None:
        """Discard the stderr that was received up to now."""
        self._buffer.stderr.clear()

    def end(self) -> ConnectionEnd:
        """Return how the connection ended, with the last line of stderr. Called after its end."""
        self._end = self._end or self._find_end(self._channel.status_event.wait)
        return replace(self._end, last_words=clause_of_last_lines(self.stderr_tail(), 1))

    def _find_end(self, wait: Callable[[float], object]) -> ConnectionEnd:
        if not self._buffer.ended:
            return ConnectionEnd(kind=EndKind.CLOSED_HERE)
        if self._transport.is_active():
            wait_budget.spend(wait)  # the status follows the end of stdout
        status = self._channel.exit_status
        if status >= 0:
            return ConnectionEnd(kind=EndKind.EXITED, number=status)
        if self._transport.is_active() and not self._channel.event_ready:
            return ConnectionEnd(kind=EndKind.COMMAND_REFUSED)
        error = self._transport.get_exception()
        if reason := self._stream.why_closed():
            return ConnectionEnd(kind=EndKind.CARRIER, text=reason)
        if error is None or isinstance(error, EOFError):
            return ConnectionEnd(kind=EndKind.CLOSED_BY_PEER)
        text = printable(str(error) or type(error).__name__)
        return ConnectionEnd(kind=EndKind.FAILED, text=text)


class ByteStream(Protocol):
    """The stream below an SSH connection."""

    sock: Any
    """For paramiko: a socket, or a channel of another connection."""

    def can_write(self) -> bool:
        """Return whether a short message can be sent without waiting for the network."""

    def close(self) -> None:
        """End the stream and wake all threads that wait for it. Can be called again."""

    def free(self) -> None:
        """Release descriptors. Called when no thread waits for the stream any longer."""

    def why_closed(self) -> str:
        """Return why the stream ended; "" if unknown."""


class ReceiveBuffer:
    """Bytes received on a channel, in place of paramiko's ``BufferedPipe``. An eventfd is readable
    while it has bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: list[bytes] = []
        self._size = 0
        self._closed = False
        self._ready = False
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.stderr = bytearray()
        self._taken = 0
        # Bytes received since the last window adjustment.

    def fileno(self) -> int:
        """Return the descriptor that is readable while the buffer has bytes or has ended."""
        return self._descriptor

    def feed(self, data: bytes) -> None:
        """Add received bytes. Called by paramiko's thread.

        Raises SSHException if the server ignores the window.
        """
        with self._lock:
            self._chunks.append(bytes(data))
            self._size += len(data)
            self._wake()
            excess = self._size > _MOST_KEPT
        if excess:
            from paramiko import SSHException

            raise SSHException("the server sends more than its window allows")

    def feed_stderr(self, data: bytes) -> None:
        """Add received bytes of stderr. Called by paramiko's thread."""
        with self._lock:
            self.stderr += data
            del self.stderr[:-_STDERR_TAIL]
            self._taken += len(data)
            self._wake()

    def unread(self, data: bytes) -> None:
        """Insert bytes at the beginning of the buffer."""
        with self._lock:
            self._chunks.insert(0, data)
            self._size += len(data)
            self._taken -= len(data)
            self._wake()

    def _wake(self) -> None:
        if not self._ready and self._descriptor >= 0:
            self._ready = True
            os.eventfd_write(self._descriptor, 1)

    def take(self) -> bytes | None:
        """Return bytes that have arrived, perhaps none, at most some 512 KiB; None at the end of
        the stream."""
        with self._lock:
            count, size = 0, 0
            while count < len(self._chunks) and size < _MOST_TAKEN:
                size += len(self._chunks[count])
                count += 1
            data = b"".join(self._chunks[:count])
            del self._chunks[:count]
            self._size -= size
            self._taken += size
            if not self._chunks and not self._closed and self._ready:
                self._ready = False
                os.eventfd_read(self._descriptor)
            return None if self._closed and not data else data

    @property
    def ended(self) -> bool:
        """Whether no more bytes will arrive."""
        return self._closed

    def needs_window(self) -> bool:
        """Return whether a window adjustment is due."""
        return self._taken >= _GRANT

    def take_window(self, back: int = 0) -> int:
        """Return the size of the window adjustment that is due, and count it as sent.

        With ``back``, count a size that could not be sent again, and return 0.
        """
        with self._lock:
            size, self._taken = (self._taken, 0) if not back else (0, self._taken + back)
            return size

    def close(self) -> None:
        """Mark the end. Called by paramiko."""
        with self._lock:
            self._closed = True
            self._wake()

    def release(self) -> None:
        """Discard the bytes in the buffer, and close its descriptor."""
        with self._lock:
            self._closed = True
            self._chunks.clear()
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def __len__(self) -> int:
        return self._size


class StderrBuffer:
    """The stderr of a channel, in place of paramiko's buffer."""

    def __init__(self, buffer: ReceiveBuffer) -> None:
        self._buffer = buffer

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer.feed_stderr(data)

    def close(self) -> None:
        """Do nothing: the end of stdout is the end of the channel."""

    def __len__(self) -> int:
        return 0
