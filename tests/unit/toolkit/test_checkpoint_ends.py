"""Ends of checkpoints: signals, after close, in forked processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest

from tests.facts import mentions

torch = pytest.importorskip("torch")

from torch import nn

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint, Stopped
from distlaunch.toolkit.checkpoint.storage import CheckpointError
from distlaunch.toolkit.checkpoint.write import Writing


def made(where, **options):
    return Checkpoint(where, model=nn.Linear(1, 1), **options)


def names(where):
    return sorted(name for name in os.listdir(where) if name.startswith("step-"))


@pytest.fixture(autouse=True)
def handlers_are_back():
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_the_first_of_two_may_be_closed_first(tmp_path):
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    first.close()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped):
        second.step(0)
    assert names(tmp_path / "b") == ["step-000000001"]


def test_term_has_both_of_two_saved_before_the_end(tmp_path):
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    first.step(0)
    second.step(0)
    os.kill(os.getpid(), signal.SIGTERM)
    first.step(1)
    with pytest.raises(Stopped):
        second.step(1)
    assert names(tmp_path / "a") == names(tmp_path / "b") == ["step-000000002"]
    first.close()


def test_a_handler_that_calls_ours_may_do_so_after_the_end(tmp_path):
    checkpoint = made(tmp_path)
    ours, received = signal.getsignal(signal.SIGUSR1), []

    def theirs(number, frame):
        received.append(number)
        ours(number, frame)

    signal.signal(signal.SIGUSR1, theirs)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert checkpoint.step(0)
        checkpoint.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        again = made(tmp_path / "again")
        os.kill(os.getpid(), signal.SIGUSR1)
        assert again.step(0)
        again.close()
        assert len(received) == 3
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_term_is_seen_by_a_script_that_only_saves(tmp_path):
    checkpoint = made(tmp_path)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped):
        checkpoint.save(4)
    assert names(tmp_path) == ["step-000000005"]


@pytest.mark.parametrize("end", ["close", "_finish_or_stop"], ids=["close", "the block's end"])
def test_term_behind_the_last_step_ends_the_job_when_all_is_saved(tmp_path, end):
    checkpoint = made(tmp_path, every=1)
    checkpoint.step(0)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        getattr(checkpoint, end)()
    assert stopped.value.code == 143
    assert names(tmp_path) == ["step-000000001"]
    checkpoint.close()
    made(tmp_path).close()


def test_the_last_one_to_close_answers_term_and_an_error_goes_before_it(tmp_path):
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    os.kill(os.getpid(), signal.SIGTERM)
    first.close()
    with pytest.raises(KeyError), second_closed(second):
        raise KeyError("of the training")


def test_a_term_that_is_noticed_in_the_handling_of_an_error_is_reported(tmp_path, caplog):
    """Otherwise the error that ends the job would have no traceback."""
    checkpoint = made(tmp_path)
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        raise KeyError("of the training")
    except KeyError:
        checkpoint.close()
    assert mentions(caplog.text, "SIGTERM", "last step")
    assert mentions(caplog.text, "KeyError")


@contextmanager
def second_closed(checkpoint):
    try:
        yield
    finally:
        checkpoint.close()


@pytest.mark.parametrize("method", ["save", "step"])
def test_after_close_nothing_is_saved(tmp_path, method):
    checkpoint = made(tmp_path, every=1)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ConfigError, match=rf"{method}\(\) after close\(\)"):
        getattr(checkpoint, method)(0)
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", [np.int64(2), torch.tensor(2)])
def test_a_step_may_be_any_whole_number(tmp_path, step):
    checkpoint = made(tmp_path)
    checkpoint.save(step)
    checkpoint.close()
    assert json.loads((tmp_path / "step-000000003" / "manifest.json").read_text())["steps"] == 3


@pytest.mark.parametrize(
    ("method", "step"), [("save", 1.0), ("save", -5), ("save", "1"), ("step", None)]
)
def test_any_other_step_is_refused(tmp_path, method, step):
    checkpoint = made(tmp_path)
    with pytest.raises(ConfigError, match=f"the step .*{step!r}"):
        getattr(checkpoint, method)(step)
    checkpoint.close()
    assert names(tmp_path) == []


def test_after_going_back_signals_are_handled_at_once(tmp_path):
    checkpoint = made(tmp_path)
    checkpoint.save(9)
    checkpoint._request_schedule._next = 3000
    assert checkpoint.resume() == 10
    assert checkpoint._request_schedule.is_due(11)
    checkpoint.close()


def test_a_forked_child_ends_while_its_parent_writes(tmp_path, monkeypatch):
    real, hold = Writing._commit, [True]

    def slow(*args):
        while hold:
            time.sleep(0.01)
        real(*args)

    monkeypatch.setattr(Writing, "_commit", slow)
    checkpoint = made(tmp_path)
    checkpoint.save(0, background=True)
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        checkpoint._finish()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    hold.clear()
    checkpoint.close()
    assert names(tmp_path) == ["step-000000001"]


def test_an_error_of_any_kind_is_reported_and_nothing_stays(tmp_path, monkeypatch):
    """Object stores raise plain Exceptions."""
    checkpoint = made(tmp_path)

    def failing(*_):
        raise Exception("no credentials")

    monkeypatch.setattr(type(checkpoint._store), "commit", failing)
    with pytest.raises(
        CheckpointError, match=r"not written: Exception: no credentials; .* none before"
    ):
        checkpoint.save(0)
    monkeypatch.undo()
    checkpoint.close()
    assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.parametrize("when", ["before", "while it is written"])
def test_a_directory_that_is_removed_is_reported_and_nothing_is_reported_as_kept(
    tmp_path, monkeypatch, when
):
    where = tmp_path / "c"
    checkpoint = made(where)
    checkpoint.save(0)
    real = Writing._write_files

    def removing(*args):
        shutil.rmtree(where)
        return real(*args)

    if when == "before":
        shutil.rmtree(where)
    else:
        monkeypatch.setattr(Writing, "_write_files", removing)
    with pytest.raises(CheckpointError, match="removed"):
        checkpoint.save(1)
    checkpoint.close()


def test_a_checkpoint_that_lacks_a_worker_is_not_completed(tmp_path, monkeypatch):
    checkpoint = made(tmp_path)
    monkeypatch.setattr(checkpoint._writing.group, "size", 2)
    with pytest.raises(CheckpointError, match="rank 1"):
        checkpoint.save(0)
    checkpoint.close()
    assert names(tmp_path) == []


def unsaved(caplog):
    """Return the messages about steps that are not saved."""
    return [each.getMessage() for each in caplog.records if "not saved" in each.getMessage()]


def test_steps_behind_the_last_checkpoint_are_named_at_the_end(tmp_path, caplog):
    checkpoint = made(tmp_path, every=20)
    for step in range(checkpoint.resume(), 35):
        checkpoint.step(step)
    checkpoint.close()
    checkpoint.close()
    assert names(tmp_path) == ["step-000000020"]
    (message,) = unsaved(caplog)
    assert mentions(message, "warning", "15 steps", "35", "checkpoint.save()", "smaller every")


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"every": 9}, "choose a smaller every"),
        ({"every_s": 900.0}, "choose a smaller every_s"),
        ({}, "give every"),
    ],
)
def test_a_training_that_has_saved_nothing_gets_a_notice(tmp_path, caplog, options, change):
    checkpoint = made(tmp_path, **options)
    checkpoint.step(0)
    checkpoint.close()
    (message,) = unsaved(caplog)
    assert mentions(message, "warning", "1 step", "checkpoint.save()")
    assert message.endswith(f" or {change}")


def test_save_without_a_step_saves_the_last_one_and_nothing_where_there_is_none(tmp_path, caplog):
    for _ in range(2):  # the second run finds the job finished
        checkpoint = made(tmp_path, every=20)
        for step in range(checkpoint.resume(), 35):
            checkpoint.step(step)
        checkpoint.save()
        checkpoint.save()
        checkpoint.close()
        assert names(tmp_path) == ["step-000000020", "step-000000035"]
    assert unsaved(caplog) == []
    assert "saved already" not in caplog.text
    assert mentions(caplog.text, "already ended", "35 steps")
    checkpoint = made(tmp_path / "none")
    checkpoint.save()
    checkpoint.close()
    assert names(tmp_path / "none") == []


def test_save_without_a_step_waits_for_the_same_one_in_the_background(tmp_path):
    checkpoint = made(tmp_path, every=5)
    for step in range(5):
        checkpoint.step(step)
    checkpoint.save()
    assert names(tmp_path) == ["step-000000005"]
    checkpoint.close()
    assert names(tmp_path) == ["step-000000005"]


@pytest.mark.parametrize(
    ("background", "message"),
    [(True, "saving {}/step-000000003 in the background"), (False, "saved {}/step-000000003")],
)
def test_a_save_by_usr1_is_logged_and_one_by_time_is_not(tmp_path, caplog, background, message):
    checkpoint = made(tmp_path, background=background, every_s=1e-9)
    checkpoint.step(1)
    assert "SIGUSR1" not in caplog.text
    os.kill(os.getpid(), signal.SIGUSR1)
    checkpoint.step(2)
    checkpoint.step(3)
    checkpoint.close()
    lines = [each.getMessage() for each in caplog.records if "SIGUSR1" in each.getMessage()]
    (line,) = lines
    assert line.endswith(message.format(tmp_path))


def test_nothing_is_reported_about_steps_where_all_are_saved_or_none_was_made(tmp_path, caplog):
    made(tmp_path / "a", every=20).close()
    checkpoint = made(tmp_path / "b", every=20)
    for step in range(checkpoint.resume(), 35):
        checkpoint.step(step)
    checkpoint.save(34)
    checkpoint.close()
    checkpoint = made(tmp_path / "b", every=20)
    assert checkpoint.resume() == 35
    checkpoint.close()
    checkpoint = made(tmp_path / "c", every=5)
    for step in range(10):
        checkpoint.step(step)
    checkpoint.close()
    assert unsaved(caplog) == []


def test_nothing_is_reported_about_steps_where_an_error_or_a_signal_ends_the_training(
    tmp_path, caplog
):
    checkpoint = made(tmp_path / "a", every=20)
    checkpoint.step(0)
    with pytest.raises(KeyError), closing(checkpoint):
        raise KeyError
    checkpoint = made(tmp_path / "b", every=20)
    checkpoint.step(0)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped):
        checkpoint.close()
    assert unsaved(caplog) == []


@pytest.mark.parametrize(("end", "count"), [("", 1), ("raise KeyError", 0)])
def test_python_s_end_without_close_names_unsaved_steps_unless_an_error_ends_it(
    tmp_path, end, count
):
    program = (
        "import sys\n"
        "from torch import nn\n"
        "from distlaunch.toolkit import Checkpoint\n"
        "checkpoint = Checkpoint(sys.argv[1], model=nn.Linear(1, 1), every=2)\n"
        "for step in range(3):\n"
        "    checkpoint.step(step)\n"
        f"{end}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=100
    )
    assert done.stderr.count("the last 1 step of 3 is not saved") == count, done.stderr
    assert done.returncode == (0 if count else 1)
    assert names(tmp_path) == ["step-000000002"]
