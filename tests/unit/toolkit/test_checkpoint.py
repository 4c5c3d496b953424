# ruff: noqa: NPY002 - numpy's global generator is what is saved

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.facts import mentions

torch = pytest.importorskip("torch")

from torch import nn

from distlaunch.core.errors import ConfigError
from distlaunch.toolkit.batches import StatefulBatchSampler
from distlaunch.toolkit.checkpoint.checkpoint import Checkpoint, Stopped
from distlaunch.toolkit.checkpoint.storage import AllDamagedError, CheckpointError
from tests.unit.toolkit.training import Training, checkpoints, names, train

OPTIMIZER = torch.optim.SGD(nn.Linear(1, 1).parameters())


@pytest.fixture(autouse=True, scope="module")
def torch_has_set_its_variables(tmp_path_factory):
    """Expect torch to set TORCHINDUCTOR_CACHE_DIR at an optimizer's first step."""
    before = dict(os.environ)
    train(tmp_path_factory.mktemp("first"), 1)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]


@pytest.mark.parametrize("background", [True, False])
def test_a_training_that_goes_on_is_the_one_that_never_stopped_bit_for_bit(tmp_path, background):
    random.seed(1)
    np.random.seed(1)
    whole, start = train(tmp_path / "whole", 7, background=background)
    assert start == 0
    drawn = random.random(), float(np.random.rand()), torch.rand(1)
    random.seed(1)
    np.random.seed(1)
    train(tmp_path / "cut", 4)
    random.seed(99)
    np.random.seed(99)
    resumed, start = train(tmp_path / "cut", 7)
    assert start == 4
    assert resumed.values() == whole.values()
    assert (random.random(), float(np.random.rand()), torch.rand(1)) == drawn


def test_saving_changes_nothing_of_a_training(tmp_path):
    training = Training()
    training.step()

    def everything():
        return (
            training.values(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )

    before = everything()
    with checkpoints(tmp_path, training) as checkpoint:
        checkpoint.save(0, background=True)
        checkpoint.wait()
    assert everything() == before


def test_older_ones_go_when_the_new_one_is_whole_and_not_before(tmp_path, monkeypatch):
    train(tmp_path, 5, keep=2)
    assert names(tmp_path) == ["step-000000004", "step-000000005"]
    real = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: _no_space() if "/.saving-" in os.readlink(f"/proc/self/fd/{fd}") else real(fd),
    )
    with pytest.raises(CheckpointError):
        train(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step-000000004", "step-000000005"]


def _no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes, not"),
        (lambda file: file.write_bytes(file.read_bytes()[:-9] + bytes(9)), "CRC-32"),
        (lambda file: file.unlink(), "is missing"),
    ],
    ids=["cut", "changed", "missing"],
)
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_a_damaged_newest_one_is_skipped_with_a_warning_that_names_it(
    tmp_path, caplog, file, harm, text
):
    values = train(tmp_path, 2)[0].values()
    train(tmp_path, 3)
    harm(tmp_path / "step-000000003" / file)
    resumed, start = train(tmp_path, 2)
    assert start == 2
    assert resumed.values() == values
    logged = [
        record.getMessage() for record in caplog.records if record.name == "distlaunch.checkpoint"
    ]
    warned = [line for line in logged if " is damaged: " in line]
    assert len(warned) == 1
    assert logged[-2].startswith(
        f"distlaunch: resumed from {tmp_path}/step-000000002, after 2 steps, saved "
    )
    assert mentions(logged[-1], "no step", "2 steps")
    assert f"{tmp_path}/step-000000003 is damaged: " in warned[0]
    assert file in warned[0] or "manifest" in warned[0]
    assert (text in warned[0]) or file == "manifest.json"
    assert names(tmp_path) == ["step-000000001", "step-000000002"], "the damaged one is set aside"
    assert [name for name in os.listdir(tmp_path) if name.startswith("aside-step-000000003-")]
    train(tmp_path, 3)
    assert names(tmp_path) == ["step-000000001", "step-000000002", "step-000000003"]


def test_where_none_is_whole_the_training_does_not_begin_anew_by_itself(tmp_path):
    train(tmp_path, 2)
    for name in names(tmp_path):
        (tmp_path / name / ".metadata").write_bytes(b"")
    with pytest.raises(AllDamagedError, match=r"step-000000002 .*step-000000001"):
        train(tmp_path, 3)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_half_written_files_of_a_killed_save_are_removed(tmp_path):
    train(tmp_path, 2)
    shutil.copytree(tmp_path / "step-000000002", tmp_path / ".saving-step-000000003-0a0b0c0d")
    shutil.copytree(tmp_path / "step-000000002", tmp_path / ".removing-step-000000001-0a0b0c0d")
    assert train(tmp_path, 2)[1] == 2
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-000000001", "step-000000002"]


def test_an_older_one_can_be_resumed_and_the_newer_ones_are_set_aside(tmp_path):
    train(tmp_path, 3)
    training = Training()
    with checkpoints(tmp_path, training, every=1) as checkpoint:
        assert checkpoint.resume(steps=1) == 1
        training.step()
        checkpoint.step(1)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    with (
        checkpoints(tmp_path, training) as checkpoint,
        pytest.raises(ConfigError, match=r"none after 9 steps.*2, 1"),
    ):
        checkpoint.resume(steps=9)


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_keeps_the_last_whole_checkpoint_and_is_reported(tmp_path, background):
    """A limit on the size of files replaces the disk, so that a write fails within torch's
    writer."""
    train(tmp_path, 1)
    program = f"""
import resource, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from training import Training, checkpoints
training = Training(hidden=4)
with checkpoints({str(tmp_path)!r}, training, every=1, background={background}) as checkpoint:
    checkpoint.resume()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    training.step()
    checkpoint.step(1)
    checkpoint.wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert (
        f"checkpoint {tmp_path}/step-000000002 not written: rank 0: [Errno 27] File too large"
        in last
    )
    assert mentions(last, "step-000000001", "kept")
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-000000001"], "and the room is given back"
    assert train(tmp_path, 3)[1] == 1


@pytest.mark.parametrize("where", ["manifest.json", ".metadata.tmp", "__0_0.distcp"])
def test_a_disk_that_fills_up_in_any_file_is_reported_alike(tmp_path, monkeypatch, where):
    train(tmp_path, 1)
    real = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: _no_space() if os.readlink(f"/proc/self/fd/{fd}").endswith(where) else real(fd),
    )
    with pytest.raises(CheckpointError, match=r"No space left on device.*step-000000001 .* kept"):
        train(tmp_path, 2)
    monkeypatch.undo()
    assert train(tmp_path, 2)[1] == 1


def test_another_model_is_refused_and_the_error_names_what_differs(tmp_path):
    train(tmp_path, 1)
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, 2, training=Training(hidden=6))
    text = str(refused.value)
    assert mentions(text, f"{tmp_path}/step-000000001", "another model", "7 parameters")
    assert mentions(text, "0.weight", "[6, 3]", "[4, 3]")
    assert text.endswith("; and 2 more")
    with pytest.raises(
        ConfigError, match=r"2 parameters .* unused.weight \[2, 2\] .* here; unused.bias"
    ):
        train(tmp_path, 2, training=Training(unused=True))
    train(tmp_path / "more", 1, training=Training(unused=True))
    with pytest.raises(ConfigError, match=r"unused.(weight|bias) \[2(, 2)?\] .* the checkpoint"):
        train(tmp_path / "more", 2)


@pytest.mark.parametrize(
    ("saved", "read", "text"),
    [
        (
            torch.optim.AdamW,
            torch.optim.SGD,
            "2.bias|0.weight.* and 3 more: the optimizer was AdamW, and is SGD here",
        ),
        (
            torch.optim.Adam,
            torch.optim.Adamax,
            "0.weight, 0.bias, 1.weight and 3 more: the optimizer was Adam, and is",
        ),
        (torch.optim.AdamW, torch.optim.Adam, "the optimizer was AdamW, and is Adam here"),
    ],
)
def test_another_optimizer_is_refused(tmp_path, saved, read, text):
    train(tmp_path, 1, training=Training(optimizer=saved))
    with pytest.raises(ConfigError, match=text) as refused:
        train(tmp_path, 2, training=Training(optimizer=read))
    assert mentions(str(refused.value), "another optimizer")


def test_parameters_without_a_gradient_have_no_state_before_or_after(tmp_path):
    whole, _ = train(tmp_path / "whole", 4, training=Training(unused=True))
    train(tmp_path / "cut", 2, training=Training(unused=True))
    resumed, start = train(tmp_path / "cut", 4, training=Training(unused=True))
    assert start == 2
    assert len(resumed.optimizer.state) == len(whole.optimizer.state) == 6
    assert len(resumed.values()) == len(whole.values())


def test_a_directory_with_checkpoints_is_not_trained_over_without_resume(tmp_path):
    train(tmp_path, 2)
    training = Training()
    with (
        checkpoints(tmp_path, training, every=1) as checkpoint,
        pytest.raises(ConfigError, match="call resume"),
    ):
        checkpoint.step(0)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_two_in_one_directory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("distlaunch.toolkit.checkpoint.directory._WAIT_S", 0.0)
    training = Training()
    with (
        checkpoints(tmp_path, training),
        pytest.raises(ConfigError, match="another Checkpoint"),
    ):
        Checkpoint(tmp_path, model=training.model)
    holder = (
        "import sys; from distlaunch.toolkit import Checkpoint; from torch import nn; "
        "held = Checkpoint(sys.argv[1], model=nn.Linear(1, 1)); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "DISTLAUNCH_JOB_ID": "the-other",
        },
    ) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"job the-other, process {process.pid} "):
            Checkpoint(tmp_path, model=training.model)
        process.kill()
    with checkpoints(tmp_path, training) as checkpoint:
        assert checkpoint.resume() == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": 0}, "keep is 0"),
        ({"keep": None}, "keep is None"),
        ({"keep": True}, "keep is True"),
        ({"every": -1}, "every is -1"),
        ({"every_s": 0.0}, "every_s is 0.0"),
        ({"keep": 1.5}, "keep is 1.5, and has to be a whole number"),
        ({"every": "5"}, "every is '5', and has to be a whole number"),
        ({"every_s": float("nan")}, "every_s is nan"),
        ({"scaler": 3}, r"scaler \(int\) has no state_dict"),
        (
            {"extra": {"n": 1}},
            r"extra \(dict\) has no state_dict\(\) .*: give an object .* help checkpoints",
        ),
        ({"evry": 2}, r"Checkpoint: evry: did you mean every\?"),
        ({"every2": 2}, r"Checkpoint: every2: did you mean every\?"),
        ({"every_sec": 2.0}, r"Checkpoint: every_sec: did you mean every_s\?"),
        ({"optimiser": OPTIMIZER}, r"Checkpoint: optimiser: did you mean optimizer\?"),
        ({"sheduler": None}, r"Checkpoint: sheduler: did you mean scheduler\?"),
        ({"optimizer": "adam"}, "optimizer is a str"),
        ({"optimizer": {}}, "optimizer is a dict"),
        ({"optimizer": [OPTIMIZER, OPTIMIZER]}, "optimizer has one of them twice"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
            r"\(SGD\) has parameters that the model does not",
        ),
        ({"model": None}, "model is a NoneType"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, text):
    with pytest.raises(ConfigError, match=text):
        Checkpoint(tmp_path, **{"model": nn.Linear(1, 1), **options})


def test_a_part_may_be_named_by_a_parameter_and_more(tmp_path):
    training = Training()
    average = Training().model
    epochs = torch.utils.data.DistributedSampler([0, 1], num_replicas=1, rank=0)
    options = {"lr_scheduler": training.scheduler, "models": average, "my_sampler": epochs}
    checkpoint = Checkpoint(tmp_path, model=training.model, optimizer_b=None, **options)
    checkpoint.save(0)
    checkpoint.close()
    assert names(tmp_path) == ["step-000000001"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{tmp_path}/file/a: Not a directory"):
        Checkpoint(tmp_path / "file" / "a", model=nn.Linear(1, 1))


def test_several_workers_need_a_process_group_first(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE .* 2, .*init\(\)"):
        Checkpoint(tmp_path, model=nn.Linear(1, 1))


def test_usr1_saves_and_goes_on_and_term_saves_and_ends(tmp_path, caplog):
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        training = Training()
        caplog.set_level(logging.WARNING)
        with checkpoints(tmp_path, training) as checkpoint:
            for step in range(9):
                training.step()
                if step == 3:
                    os.kill(os.getpid(), signal.SIGUSR1)
                assert checkpoint.step(step) == (step == 3)
            assert received == [signal.SIGUSR1], "the script's own handler is called as well"
            training.step()
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Stopped) as stopped:
                checkpoint.step(9)
        assert stopped.value.code == 143
        assert names(tmp_path) == ["step-000000004", "step-000000010"]
        assert mentions(caplog.text, "SIGTERM", "saved", f"{tmp_path}/step-000000010")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_ends_at_term_as_ever(tmp_path):
    with checkpoints(tmp_path, Training()):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"x")
            while True:  # a pause() would miss a signal that has come just before it
                signal.sigtimedwait([], 0.05)
        os.read(reading, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        assert os.WTERMSIG(status) == signal.SIGTERM


def test_the_same_step_is_saved_once_and_an_earlier_one_not_again(tmp_path):
    training = Training()
    with checkpoints(tmp_path, training, every=1) as checkpoint:
        assert checkpoint.step(0)
        checkpoint.save(0)
        checkpoint.step(1)
        with pytest.raises(ConfigError, match="step 0 after step 1"):
            checkpoint.save(0)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_a_checkpoint_may_be_due_after_seconds(tmp_path):
    training = Training()
    with checkpoints(tmp_path, training, every_s=1e-9) as checkpoint:
        assert checkpoint.step(0)
    assert names(tmp_path) == ["step-000000001"]


def test_a_distributed_sampler_keeps_its_epoch(tmp_path):
    from torch.utils.data.distributed import DistributedSampler

    sampler = DistributedSampler(range(9), num_replicas=3, rank=0)
    sampler.set_epoch(4)
    with checkpoints(tmp_path, Training(), sampler=sampler) as checkpoint:
        checkpoint.save(0)
    sampler.set_epoch(0)
    with checkpoints(tmp_path, Training(), sampler=sampler) as checkpoint:
        assert checkpoint.resume() == 1
    assert sampler.epoch == 4


def test_a_part_that_the_checkpoint_lacks_is_reported_and_keeps_what_it_is(tmp_path, caplog):
    train(tmp_path, 1)
    with checkpoints(tmp_path, Training(), sampler=StatefulBatchSampler(range(9), 2)) as checkpoint:
        checkpoint.resume()
    assert mentions(caplog.text, f"{tmp_path}/step-000000001", "nothing", "sampler")


def test_the_manifest_lists_its_contents(tmp_path):
    train(tmp_path, 2)
    manifest = json.loads((tmp_path / "step-000000002" / "manifest.json").read_text())
    assert (manifest["format"], manifest["steps"], manifest["world_size"]) == (1, 2, 1)
    assert manifest["files"].keys() == {"__0_0.distcp", ".metadata"}
    for file, (size, _) in manifest["files"].items():
        assert (tmp_path / "step-000000002" / file).stat().st_size == size
