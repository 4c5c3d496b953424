from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from distlaunch.toolkit import heartbeat
from distlaunch.toolkit import progress as toolkit


@pytest.fixture
def clean(monkeypatch):
    for name, value in (
        ("_next_send_at", 0.0),
        ("_descriptor", -1),
        ("_pipe", None),
        ("_owner_pid", 0),
        ("_sent", {}),
        ("_step", None),
    ):
        monkeypatch.setattr(toolkit, name, value)


@pytest.fixture
def launcher(clean, monkeypatch):
    """Yield the launcher's end of the pipe and the worker's."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    monkeypatch.setenv("DISTLAUNCH_PROGRESS_FD", str(writer))
    yield reader, writer
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:
            pass


def sent(reader: int) -> list[dict]:
    try:
        return [json.loads(line) for line in os.read(reader, 65536).splitlines()]
    except BlockingIOError:
        return []


def again() -> None:
    """Reset the time of the next line."""
    toolkit._next_send_at = 0.0


class Tensor:
    def __init__(self) -> None:
        self.asked = 0

    def __float__(self) -> float:
        self.asked += 1
        return 0.25


def test_numbers_are_sent_as_a_line_of_json(launcher):
    heartbeat(step=120, loss=0.31, samples=4096)
    assert os.read(launcher[0], 100) == b'{"step": 120, "loss": 0.31, "samples": 4096}\n'


def test_calls_in_quick_succession_send_once_and_convert_once(launcher):
    loss = Tensor()
    for step in range(1000):
        heartbeat(step=step, loss=loss)
    assert sent(launcher[0]) == [{"step": 0, "loss": 0.25}]
    assert loss.asked == 1
    again()
    heartbeat(step=1000, loss=loss)
    assert sent(launcher[0]) == [{"step": 1000, "loss": 0.25}]


def test_a_heartbeat_may_be_without_numbers(launcher):
    heartbeat()
    assert sent(launcher[0]) == [{}]


def test_values_that_are_not_finite_numbers_are_left_out(launcher):
    class Hostile:
        def __float__(self):
            raise RuntimeError("no")

    heartbeat(
        step=1,
        true=True,
        word="x",
        nothing=None,
        hostile=Hostile(),
        nan=float("nan"),
        inf=float("inf"),
        huge=10**5000,
        last=2.5,
    )
    assert sent(launcher[0]) == [{"step": 1, "last": 2.5}]


def test_tensors_with_a_gradient_are_detached(launcher):
    class Loss:
        def __float__(self):
            raise AssertionError("would warn")

        def detach(self):
            return 0.5

    heartbeat(step=1, loss=Loss())
    assert sent(launcher[0]) == [{"step": 1, "loss": 0.5}]


@pytest.mark.parametrize("end", ["", "raise ValueError", "raise SystemExit(3)"])
def test_the_newest_step_is_sent_when_python_ends(launcher, end):
    code = f"""
from distlaunch.toolkit import heartbeat
for step in range(1, 9):
    heartbeat(step=step, loss=step / 4)
{end}
"""
    subprocess.run(
        [sys.executable, "-c", code],
        pass_fds=launcher[1:],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert sent(launcher[0]) == [{"step": 1, "loss": 0.25}, {"step": 8, "loss": 0.25}]


@pytest.mark.parametrize(
    "calls",
    [
        "heartbeat(step=1)",
        "heartbeat(step=1); heartbeat(loss=2)",
        "heartbeat(step=1); heartbeat(step=[])",
        "heartbeat(step=1); heartbeat(step=2); os.close(int(os.environ['DISTLAUNCH_PROGRESS_FD']))",
        "heartbeat(step=1); heartbeat(step=2)\nif os.fork() == 0: raise SystemExit\nos.wait(); os._exit(0)",
    ],
)
def test_nothing_is_sent_again_at_the_end_nor_by_a_forked_child(launcher, calls):
    code = f"import os\nfrom distlaunch.toolkit import heartbeat\n{calls}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        pass_fds=launcher[1:],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == b""
    assert sent(launcher[0]) == [{"step": 1}]


def test_a_line_is_never_longer_than_the_kernel_writes_in_one_piece(launcher):
    heartbeat(step=1, **{f"name-{number}-" + "x" * 100: number for number in range(100)})
    data = os.read(launcher[0], 65536)
    assert len(data) <= toolkit.MAX_LINE_BYTES
    assert json.loads(data)["step"] == 1


def test_a_full_pipe_does_not_block_and_the_next_line_is_sent(launcher):
    reader, writer = launcher
    heartbeat(step=0)
    try:
        while True:
            os.write(writer, b"\n" * 65536)
    except BlockingIOError:
        pass
    again()
    heartbeat(step=1)
    while os.read(reader, 65536)[-1:] != b"\n" or sent_bytes(reader):
        pass
    again()
    heartbeat(step=2)
    assert sent(reader) == [{"step": 2}]


def sent_bytes(reader: int) -> bytes:
    try:
        return os.read(reader, 65536)
    except BlockingIOError:
        return b""


def test_without_a_launcher_nothing_happens(clean, monkeypatch):
    monkeypatch.delenv("DISTLAUNCH_PROGRESS_FD", raising=False)
    heartbeat(step=1)
    assert toolkit._next_send_at == float("inf")


@pytest.mark.parametrize("value", ["", "x", "-5", "99999999", "1" * 30])
def test_a_variable_that_names_no_descriptor_is_harmless(clean, monkeypatch, value):
    monkeypatch.setenv("DISTLAUNCH_PROGRESS_FD", value)
    heartbeat(step=1)
    assert toolkit._next_send_at == float("inf")


def test_a_file_or_another_pipe_under_the_number_is_never_written_to(clean, monkeypatch, tmp_path):
    reader, other = os.pipe()  # without O_NONBLOCK: not the launcher's
    with open(tmp_path / "data", "wb") as file:
        for descriptor in (file.fileno(), other, reader):
            toolkit._next_send_at, toolkit._pipe = 0.0, None
            monkeypatch.setenv("DISTLAUNCH_PROGRESS_FD", str(descriptor))
            heartbeat(step=1)
    os.close(other)
    assert os.read(reader, 10) == b""
    os.close(reader)
    assert (tmp_path / "data").read_bytes() == b""


def test_a_file_that_took_the_number_later_is_never_written_to(launcher, tmp_path):
    reader, writer = launcher
    heartbeat(step=1)
    with open(tmp_path / "data", "wb") as file:
        os.dup2(file.fileno(), writer)
    again()
    heartbeat(step=2)
    assert (tmp_path / "data").read_bytes() == b""
    assert sent(reader) == [{"step": 1}]


def test_a_missing_launcher_is_no_error(launcher):
    heartbeat(step=1)
    os.close(launcher[0])
    again()
    heartbeat(step=2)
    assert toolkit._next_send_at == float("inf")


def test_threads_and_forked_children_may_report(launcher):
    threads = [
        threading.Thread(target=lambda: [(again(), heartbeat(step=1)) for _ in range(50)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = sent(launcher[0])
    assert lines
    assert all(line == {"step": 1} for line in lines)
    pid = os.fork()
    if pid == 0:
        again()
        heartbeat(step=2)
        os._exit(0)
    os.waitpid(pid, 0)
    assert sent(launcher[0]) == [{"step": 2}]


def test_importing_it_loads_no_part_of_the_launcher_and_nothing_heavy():
    code = "import sys; before = set(sys.modules); import distlaunch.toolkit; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("distlaunch")} <= {
        "distlaunch",
        "distlaunch.toolkit",
        "distlaunch.toolkit.progress",
        "distlaunch.core",
        "distlaunch.core.model",
        "distlaunch.core.model.variables",
    }
    assert len(loaded) < 12


def test_a_checkpoint_is_a_line_of_its_own(launcher):
    reader, _ = launcher
    toolkit.report_checkpoint(step=300, seconds=1.23456, size=4096)
    heartbeat(step=300)
    assert sent(reader) == [
        {"checkpoint": {"step": 300, "seconds": 1.235, "bytes": 4096}},
        {"step": 300},
    ]


def test_a_checkpoint_waits_for_room_in_the_pipe(launcher):
    reader, writer = launcher
    try:
        while True:
            os.write(writer, b" " * 65535 + b"\n")
    except BlockingIOError:
        pass
    thread = threading.Thread(
        target=toolkit.report_checkpoint, kwargs={"step": 5, "seconds": 1.0, "size": 1}
    )
    thread.start()
    found = b""
    while b"checkpoint" not in found:
        try:
            found += os.read(reader, 1 << 20)
        except BlockingIOError:
            assert thread.is_alive(), "it is sent as soon as there is room"
    thread.join(30.0)
    assert found.strip() == b'{"checkpoint": {"step": 5, "seconds": 1.0, "bytes": 1}}'


def test_a_checkpoint_without_a_launcher_is_reported_to_nobody(clean, monkeypatch):
    monkeypatch.delenv("DISTLAUNCH_PROGRESS_FD", raising=False)
    toolkit.report_checkpoint(step=1, seconds=1.0, size=1)
