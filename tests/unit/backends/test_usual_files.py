"""Default files of a backend, such as accelerate launch's default configuration."""

from __future__ import annotations

import pytest

from distlaunch.backends.accelerate import Accelerate
from distlaunch.backends.option_files import configured_backend
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions

CPUS = Topology(nodes=(Node(host="a", slots=1),), device="cpu")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path / ".cache/huggingface", "bf16")
    return tmp_path


def put(folder, precision: str):
    path = folder / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"distributed_type: NO\nmixed_precision: {precision}\n")
    return path


def configured(home, *words: str, **environ: str):
    options = TrainOptions(script="train.py", backend="accelerate", opt=words)
    backend, reported = configured_backend(Accelerate, options, environ, str(home))
    return backend.job_variables(CPUS).get("ACCELERATE_MIXED_PRECISION"), reported


def test_accelerates_default_configuration_is_read_with_a_notice(home):
    precision, reported = configured(home)
    assert precision == "bf16"
    path = home / ".cache/huggingface/accelerate/default_config.yaml"
    assert reported == (f"{path} is read (-o config=none ignores it)",)
    assert configured(home, "mixed-precision=fp16")[0] == "fp16"


def test_only_the_first_variable_with_a_path_counts(home):
    cache, hub = home / "cache", home / "hub"
    put(cache / "huggingface", "fp16")
    assert configured(home, XDG_CACHE_HOME=str(cache))[0] == "fp16"
    assert configured(home, XDG_CACHE_HOME=str(cache), HF_HOME="~/hub") == (None, ())
    put(hub, "no")
    assert configured(home, XDG_CACHE_HOME=str(cache), HF_HOME="~/hub")[0] == "no"


def test_an_option_replaces_or_ignores_the_default_file(home):
    (home / "mine.yaml").write_text("distributed_type: NO\nmixed_precision: fp8\n")
    assert configured(home, "config=mine.yaml") == ("fp8", ())
    assert configured(home, "config=none") == (None, ())
    assert configured(home, "config=none", HF_HOME="nowhere") == (None, ())


def test_errors_in_a_default_file_are_reported_with_how_to_ignore_it(home):
    path = home / ".cache/huggingface/accelerate/default_config.yaml"
    path.write_text("distributed_type: MULTI_GPUS\n")
    with pytest.raises(ConfigError, match=f"{path}:1") as caught:
        configured(home)
    assert mentions(caught.value.hint, "MULTI_GPU", "-o config=none")


def test_a_missing_file_is_reported_with_the_path_of_the_default_file(home):
    with pytest.raises(ConfigError, match="No such file") as caught:
        configured(home, "config=default_config.yaml")
    assert f"{home}/.cache/huggingface/accelerate/default_config.yaml" in str(caught.value.hint)
