from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from distlaunch.core.agent.node.ports import HeldPort, PortUse, hold_port
from distlaunch.core.errors import ConfigError
from tests.facts import mentions
from tests.ports import free_port

ADDRESSES = [
    (socket.AF_INET, "127.0.0.1"),
    (socket.AF_INET, "0.0.0.0"),
    (socket.AF_INET6, "::1"),
    (socket.AF_INET6, "::"),
]
IDS = [address for _, address in ADDRESSES]


@pytest.fixture(autouse=True)
def private_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def held():
    port = hold_port(0, owner="job-a")
    yield port
    port.release()


def server(family: int, address: str, port: int, *, reuse: bool) -> socket.socket:
    """Bind and listen like a server. Raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def hold_as_another_user(port: int, tmp_path, monkeypatch, *, owner: str = "job-b") -> HeldPort:
    """Reserve a port like a job that cannot see our locks."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "another"))
    return hold_port(port, owner=owner)


def test_automatic_ports_differ():
    ports = [hold_port(0, owner="job") for _ in range(20)]
    numbers = [port.number for port in ports]
    for port in ports:
        port.release()
    assert len(set(numbers)) == 20
    assert min(numbers) > 1023


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(("family", "address"), ADDRESSES, ids=IDS)
def test_nobody_can_bind_a_reserved_port(held, family, address, reuse):
    with pytest.raises(OSError, match="in use"):
        server(family, address, held.number, reuse=reuse)


@pytest.mark.parametrize(("family", "address"), ADDRESSES, ids=IDS)
def test_nothing_listens_on_a_reserved_port(held, family, address):
    with closing(socket.socket(family)) as client:
        assert (
            client.connect_ex(("::1" if family == socket.AF_INET6 else "127.0.0.1", held.number))
            != 0
        )


@pytest.mark.parametrize(("family", "address"), ADDRESSES, ids=IDS)
def test_a_server_with_reuseaddr_can_bind_a_shared_port(held, family, address):
    held.share()
    with pytest.raises(OSError, match="in use"):
        server(family, address, held.number, reuse=False)
    with closing(server(family, address, held.number, reuse=True)) as listening:
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        with closing(socket.create_connection((host, held.number))) as client:
            accepted, _ = listening.accept()
            accepted.close()
            assert client.recv(1) == b""
        with pytest.raises(OSError, match="in use"):
            server(family, address, held.number, reuse=True)


@pytest.mark.parametrize("shared", [False, True])
def test_a_released_port_is_free_again(shared):
    port = hold_port(0, owner="job")
    if shared:
        port.share()
    port.release()
    port.release()
    server(socket.AF_INET6, "::", port.number, reuse=False).close()
    hold_port(port.number, owner="job").release()


def test_an_error_names_the_job_that_has_reserved_the_port():
    port = hold_port(free_port(), owner="20261128-101010-abcdef")
    with pytest.raises(ConfigError) as caught:
        hold_port(port.number, owner="other")
    port.release()
    assert mentions(
        str(caught.value), f"port {port.number}", "job 20261128-101010-abcdef", f"pid {os.getpid()}"
    )
    assert caught.value.hint is None


def test_an_error_names_the_current_job():
    number = free_port()
    hold_port(number, owner="a-first-job-with-a-long-name").release()
    port = hold_port(number, owner="second")
    with pytest.raises(ConfigError) as caught:
        hold_port(number, owner="third")
    port.release()
    assert str(caught.value).endswith(f"job second (pid {os.getpid()})")


@contextmanager
def taking(number, tmp_path):
    """Lock a port like a job that has not written its name yet. Yields both locks."""
    hold_port(number, owner="one-before").release()
    [folder] = tmp_path.iterdir()
    turn, lock = (
        os.open(folder, os.O_RDONLY),
        os.open(folder / f"port-{number}", os.O_RDWR | os.O_CREAT),
    )
    try:
        for descriptor in (turn, lock):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield lock, turn
    finally:
        os.close(turn)
        os.close(lock)


def test_a_job_that_is_reserving_the_port_is_waited_for_and_named(tmp_path):
    number = free_port()
    with taking(number, tmp_path) as (lock, turn):

        def pause(_):
            os.write(lock, b"job-a (pid 1)")
            fcntl.flock(turn, fcntl.LOCK_UN)

        with pytest.raises(ConfigError) as caught:
            hold_port(number, owner="job-b", pause=pause)
    assert mentions(caught.value.message, f"port {number}", "job job-a", "pid 1")


def test_a_job_that_was_stopped_while_reserving_is_waited_for_only_briefly(tmp_path):
    number, paused_s = free_port(), []
    with taking(number, tmp_path), pytest.raises(ConfigError) as caught:
        hold_port(number, owner="job-b", pause=paused_s.append)
    assert 0.5 < sum(paused_s) < 10
    assert mentions(caught.value.message, f"port {number}", "another job")


def test_two_jobs_can_reserve_different_ports():
    first, second = (
        hold_port(free_port(), owner="a"),
        hold_port(free_port(), owner="b", pause=pytest.fail),
    )
    first.release()
    second.release()


@pytest.mark.parametrize("shared", [False, True])
def test_a_job_that_cannot_see_the_lock_is_refused_too(tmp_path, monkeypatch, shared):
    port = hold_port(free_port(), owner="job-a")
    if shared:
        port.share()
    with pytest.raises(ConfigError) as caught:
        hold_as_another_user(port.number, tmp_path, monkeypatch)
    port.release()
    assert mentions(str(caught.value), f"port {port.number}", "in use")


@pytest.mark.parametrize("shared", [False, True])
def test_an_automatic_port_is_refused_to_a_job_that_asks_for_its_number(held, shared):
    if shared:
        held.share()
    with pytest.raises(ConfigError, match=f"port {held.number} "):
        hold_port(held.number, owner="job-b")


@pytest.mark.parametrize(("family", "address"), ADDRESSES, ids=IDS)
def test_an_error_names_the_listening_process_and_its_pid(family, address):
    with closing(server(family, address, 0, reuse=True)) as listening:
        number = listening.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            hold_port(number, owner="job")
    shown = str(caught.value)
    assert mentions(shown, f"port {number}", "in use", f"pid {os.getpid()}")
    title = (
        Path("/proc/self/cmdline").read_text().partition("\0")[0]
    )  # the program, or what pytest-xdist makes of it
    assert (title if title[0] == "[" else os.path.basename(title))[:6] in shown
    assert caught.value.hint is None


def test_a_refused_port_can_be_reserved_later():
    number = free_port()
    with (
        closing(server(socket.AF_INET, "127.0.0.1", number, reuse=True)),
        pytest.raises(ConfigError),
    ):
        hold_port(number, owner="first")
    hold_port(number, owner="second").release()


def leave_in_time_wait() -> int:
    """Leave the port of a closed connection in TIME_WAIT."""
    number = free_port()
    with closing(server(socket.AF_INET, "127.0.0.1", number, reuse=True)) as listening:
        client = socket.create_connection(("127.0.0.1", number))
        accepted, _ = listening.accept()
        accepted.close()
        assert client.recv(1) == b""
        client.close()
    with pytest.raises(OSError, match="in use"):
        server(socket.AF_INET, "127.0.0.1", number, reuse=False)
    return number


def test_connections_in_time_wait_do_not_block_a_port():
    number = leave_in_time_wait()
    port = hold_port(number, owner="job")
    assert port.number == number
    port.share()
    server(socket.AF_INET, "127.0.0.1", number, reuse=True).close()
    port.release()


def test_a_port_with_connections_in_time_wait_is_reserved_exclusively():
    port = hold_port(leave_in_time_wait(), owner="job")
    try:
        with pytest.raises(OSError, match="in use"):
            server(socket.AF_INET, "127.0.0.1", port.number, reuse=True).close()
    finally:
        port.release()


def test_a_port_is_reserved_even_without_a_directory_for_locks(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(blocked))
    port = hold_port(free_port(), owner="job")
    with pytest.raises(OSError, match="in use"):
        server(socket.AF_INET, "127.0.0.1", port.number, reuse=True)
    port.release()


def test_the_lock_directory_is_private(tmp_path):
    port = hold_port(free_port(), owner="job")
    [directory] = tmp_path.iterdir()
    [lock] = directory.iterdir()
    assert (directory.stat().st_mode & 0o777, lock.stat().st_mode & 0o777) == (0o700, 0o600)
    port.release()


def test_torchs_store_of_rank_0_takes_the_shared_port(held):
    held.share()
    code = f"""
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", {held.number}, 1, is_master=True, timeout=timedelta(seconds=30))
store.set("key", "value")
print(store.get("key").decode())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "value\n"), done.stderr


def test_without_a_free_port_the_error_names_none():
    def bind(_number):
        raise OSError(errno.EADDRINUSE, "in use")

    with pytest.raises(ConfigError, match="no free port") as caught:
        hold_port(0, owner="job", bind=bind)
    assert caught.value.hint is not None


def test_a_released_or_refused_port_leaves_no_lock_file(tmp_path):
    first, second = hold_port(free_port(), owner="a"), hold_port(free_port(), owner="b")
    [folder] = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {
        f"port-{first.number}",
        f"port-{second.number}",
    }
    first.release()
    assert [path.name for path in folder.iterdir()] == [f"port-{second.number}"]
    second.release()
    with (
        server(socket.AF_INET6, "::", free_port(), reuse=False) as foreign,
        pytest.raises(ConfigError),
    ):
        hold_port(foreign.getsockname()[1], owner="c")
    assert list(folder.iterdir()) == []


def test_the_next_job_removes_the_lock_file_of_a_killed_job(tmp_path):
    held = hold_port(free_port(), owner="a")
    [folder] = tmp_path.iterdir()
    (folder / "port-1").write_text("killed (pid 1)")
    (folder / "something else").write_text("not ours to remove")
    hold_port(free_port(), owner="b").release()
    assert {path.name for path in folder.iterdir()} == {f"port-{held.number}", "something else"}
    held.release()


def test_a_port_is_used_once_a_process_listens_or_was_connected():
    held = hold_port(0, owner="job")
    try:
        use = PortUse(held.number, now=0.0)
        use.tick(0.4)
        assert use.deadline() == 0.5
        use.tick(0.5)
        assert (use.is_used, use.deadline()) == (False, 1.5)
        assert not use.finish(), "a port that is held alone is not used"
        with held.listener():
            use.tick(1.5)
            assert (use.is_used, use.deadline()) == (True, None)
        use.tick(9.0)
        assert use.finish()
    finally:
        held.release()


def test_a_connection_closed_before_the_check_counts_as_use():
    held = hold_port(0, owner="job")
    try:
        use = PortUse(held.number, now=0.0)
        with held.listener() as listening:
            listening.setblocking(True)
            with socket.create_connection(("127.0.0.1", held.number)):
                listening.accept()[0].close()
        use.tick(0.5)
        assert not use.is_used, "what other nodes have tried before the start is no use"
        assert use.finish()
    finally:
        held.release()
