from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from distlaunch.core.protocol.agent_messages import GREETING
from distlaunch.transport.bootstrap import FLAGS, STUB, is_plain, remote_command, start_agent
from distlaunch.transport.connect_errors import ConnectStepError
from distlaunch.transport.connection import ConnectionEnd, EndKind
from tests.facts import mentions
from tests.sshd import stand_in

NONCE = "0123456789abcdef"
FAILED = ConnectionEnd(kind=EndKind.EXITED, number=1, last_words=": shown with more lines anyway")
MARK = GREETING + NONCE.encode() + b"\n"


class Fake:
    """A stream that gives prepared pieces, then its end or silence."""

    def __init__(
        self, *pieces: bytes, ends: bool = True, words: bytes = b"", end: ConnectionEnd = FAILED
    ) -> None:
        self.pieces = list(pieces)
        self.ends, self.words, self._end = ends, words, end
        self.sent = b""
        self.closed = False
        self._ready = os.eventfd(1)

    def fileno(self) -> int:
        return self._ready

    def receive(self) -> bytes | None:
        if self.pieces:
            return self.pieces.pop(0)
        return None if self.ends else b""

    def unread(self, data: bytes) -> None:
        self.pieces.insert(0, data)

    def send(self, data: bytes) -> None:
        self.sent += data

    def stderr_tail(self) -> bytes:
        return self.words

    def end(self) -> ConnectionEnd:
        return self._end

    def clear_stderr(self) -> None:
        self.words = b""

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake():
    made = []

    def make(*pieces, **more):
        made.append(Fake(*pieces, **more))
        return made[-1]

    yield make
    for one in made:
        os.close(one.fileno())


def start(stream, within_s: float = 10.0) -> None:
    start_agent(stream, b"code", NONCE, until=time.monotonic() + within_s, where="n3")


def connect_error(stream, within_s: float = 10.0) -> ConnectStepError:
    with pytest.raises(ConnectStepError) as caught:
        start(stream, within_s)
    assert stream.closed
    assert caught.value.text.isprintable()
    return caught.value


# --- the command


@pytest.mark.parametrize("char", ["\n", "\\", "!", '"\'"'[1]])
def test_the_command_has_no_character_that_some_shell_takes_for_its_own(char):
    command = remote_command(count=123, nonce=NONCE, pythons=["/usr/bin/python3"])
    words = command.removeprefix("exec /bin/sh -c '").removesuffix("'").split("' '")
    assert not [word for word in words if char in word]


def test_the_command_names_word_count_and_interpreters_and_nothing_else():
    command = remote_command(
        count=123, nonce=NONCE, pythons=["/opt/a b/python", "python", "/it's/python", "/x\n/python"]
    )
    assert command.endswith(f"' 'distlaunch' '{NONCE}' '123' '{STUB}' '/opt/a b/python'")


def test_words_stay_short_enough_for_an_old_csh():
    assert (
        max(len(word) for word in remote_command(count=9_999_999, nonce=NONCE * 2).split("'"))
        < 1024
    )


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/a/python", True),
        ("/a b/$x/python", True),
        ("python", False),
        ("/a'b", False),
        ("/a!", False),
        ("/a\\b", False),
    ],
)
def test_only_absolute_paths_that_can_be_quoted_are_named(path, plain):
    assert is_plain(path) == plain


def test_the_stub_reads_its_count_and_no_byte_more():
    code = stand_in(
        "import os\ndef main(word, code_fd):\n    os.write(1, word.encode() + b'|' + os.read(0, 100))\n    os._exit(0)\n"
    )
    command = [sys.executable, *FLAGS, "-c", STUB, str(len(code)), NONCE]
    done = subprocess.run(command, input=code + b"frames", capture_output=True, timeout=60)
    assert done.stdout == NONCE.encode() + b"|frames"
    assert done.stderr == b""


def test_the_stub_does_without_memfd():
    code = stand_in(
        "import os\ndef main(word, code_fd):\n    print(os.readlink('/proc/self/fd/%d' % code_fd))\n"
    )
    without = f"import os; del os.memfd_create; {STUB}"
    command = [sys.executable, *FLAGS, "-c", without, str(len(code)), NONCE]
    done = subprocess.run(command, input=code, capture_output=True, timeout=60, text=False)
    assert b"(deleted)" in done.stdout, done.stderr


def test_the_stub_ends_where_the_code_is_cut_off():
    command = [sys.executable, *FLAGS, "-c", STUB, "1000", NONCE]
    done = subprocess.run(command, input=b"x" * 500, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (98, b"", b"")


def test_the_code_is_not_inherited_by_programs():
    source = "import os\ndef main(word, code_fd):\n    print(os.get_inheritable(code_fd))\n"
    code = stand_in(source)
    command = [sys.executable, *FLAGS, "-c", STUB, str(len(code)), NONCE]
    assert subprocess.run(command, input=code, capture_output=True, timeout=60).stdout == b"False\n"


# --- the greeting


def test_noise_is_passed_over_and_what_follows_is_left(fake):
    stream = fake(b"Welcome\r\nno newline", MARK + b"frames", words=b"stty: no terminal")
    start(stream)
    assert stream.sent == b"code"
    assert stream.receive() == b"frames"
    assert stream.words == b""
    assert not stream.closed


def test_a_greeting_may_come_in_single_bytes(fake):
    stream = fake(*(bytes([byte]) for byte in b"noise" + MARK + b"f"))
    start(stream)
    assert stream.receive() == b"f"


def test_a_greeting_with_another_token_is_ignored(fake):
    assert connect_error(fake(GREETING + b"other\n")).step == "agent"


def test_noise_larger_than_what_is_kept_is_passed_over(fake):
    stream = fake(*[b"x" * 65536] * 40, b"half of " + MARK[:7], MARK[7:])
    start(stream)
    assert stream.receive() is None


def test_endless_noise_is_given_up(fake):
    reason = connect_error(fake(*[b"spam\n" * 50_000] * 100))
    assert mentions(reason.text, "n3", "16 MiB", "spam / spam / spam")
    assert not reason.passing


def test_silence_ends_at_the_deadline_with_the_last_output(fake):
    reason = connect_error(fake(b"Password:", ends=False), within_s=1.0)
    assert reason.text.endswith(" in time: Password:")
    assert reason.passing


def test_stderr_is_shown_rather_than_stdout(fake):
    reason = connect_error(fake(b"motd\n", words=b"sh: 1: python3: not found\n"))
    assert mentions(reason.text, "status 1", "sh: 1: python3: not found")


def test_a_cut_connection_may_mend_and_a_shell_that_ended_does_not(fake):
    assert connect_error(fake(end=ConnectionEnd(kind=EndKind.CLOSED_BY_PEER))).passing
    assert not connect_error(fake(end=ConnectionEnd(kind=EndKind.EXITED, number=127))).passing
    assert connect_error(
        fake(end=ConnectionEnd(kind=EndKind.EXITED, number=137))
    ).passing  # it was killed


def test_a_hostile_node_cannot_write_escapes(fake):
    reason = connect_error(fake(b"\x1b[2J\x07\xff\n" + b"\xe2\x80\xae" + b"y" * 1000 + b"\n"))
    assert len(reason.text) < 600


def test_pythons_are_listed_with_what_is_wrong_with_them(fake):
    tried = (
        b"distlaunch-old 3.8.18\ndistlaunch-tried 97 /usr/bin/python3\ndistlaunch-tried 2 /usr/bin/python\n"
        b"distlaunch-tried 127 /opt/py\x1b/python\ndistlaunch-none\n"
    )
    reason = connect_error(fake(b"motd\n" + tried, words=b"python: cannot open shared object\n"))
    assert reason.step == "python"
    assert mentions(
        reason.text,
        "n3",
        "Python 3.8.18",
        "/usr/bin/python3",
        "3.4",
        "/usr/bin/python",
        "/opt/py\\x1b/python",
        "3.10",
    )


def test_a_node_without_any_python_is_reported_to_have_none(fake):
    assert mentions(connect_error(fake(b"distlaunch-none\n")).text, "n3", "PATH", "3.10")


def test_a_traceback_is_distinguished_from_a_shell_that_ended(fake):
    words = b'Traceback (most recent call last):\n  File "x", line 1\nValueError: no\n'
    assert mentions(connect_error(fake(words=words)).text, "agent failed", "status 1")
