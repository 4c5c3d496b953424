"""The variables and arguments of DeepSpeed's options, and which options contradict each other."""

from __future__ import annotations

import json
import os

import pytest

from distlaunch.backends.backend_options import chosen_options
from distlaunch.backends.deepspeed import DeepSpeed
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from tests.facts import mentions

TWO_NODES = Topology(nodes=(Node(host="a", slots=1), Node(host="b", slots=2)), device="cuda")
CONFIG = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
}


def configured(*words: str, config: object = CONFIG) -> DeepSpeed:
    text = config if isinstance(config, str) else json.dumps(config)
    return DeepSpeed(chosen_options(words, DeepSpeed.options(), "deepspeed"), {"config": text})


def refused(*words: str, config: object = CONFIG) -> str:
    with pytest.raises(ConfigError) as caught:
        configured(*words, config=config)
    return caught.value.message


def test_without_options_only_the_launchers_own_variables_are_set():
    backend = configured()
    assert backend.job_variables(TWO_NODES) == {"CROSS_SIZE": "2"}
    assert backend.node_variables(TWO_NODES, 1) == {"CROSS_RANK": "1", "LOCAL_SIZE": "2"}
    assert backend.worker_words(1) == ()
    assert backend.notes_on(TWO_NODES) == ()


def test_zero_options_reach_accelerate_and_transformers():
    backend = configured("zero=3", "offload-param=cpu", "gradient-accumulation=4", "precision=bf16")
    assert backend.job_variables(TWO_NODES) == {
        "CROSS_SIZE": "2",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }


@pytest.mark.parametrize(
    ("to", "word"), [("deepspeed", "--deepspeed_config"), ("transformers", "--deepspeed")]
)
def test_pass_config_adds_the_configuration_to_the_scripts_arguments(to, word):
    assert configured("config=/c/ds.json", "local-rank").script_words() == ()
    backend = configured("config=/c/ds.json", f"pass-config={to}", "local-rank=on")
    assert (backend.worker_words(2), backend.script_words()) == (
        ("--local_rank=2",),
        (f"{word}=/c/ds.json",),
    )


def test_an_option_fills_in_auto_and_contradicts_other_values():
    configured("config=ds.json", "gradient-accumulation=4", "zero=2")
    assert "where zero_optimization.stage is 2" in refused("config=ds.json", "zero=3")
    assert mentions(
        refused("config=ds.json", "offload-param=cpu"), "zero_optimization.offload_param.device"
    )
    assert mentions(
        refused("config=ds.json", "zero=3", config={"zero_optimization": 3}),
        "zero_optimization.stage",
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{'a': 1}", "ds.json: not JSON: Expecting"),
        ("[1]", "not a configuration"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["single quotes", "a list", "deep"],
)
def test_an_invalid_configuration_is_refused(text, shown):
    assert shown in refused("config=ds.json", config=text)


def test_hjson_is_left_to_deepspeed():
    configured("config=ds.hjson", config="{train_batch_size: 8 # per step\n}")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["zero=0", "offload-optimizer=cpu"],
            "-o offload-optimizer=cpu and -o zero=0 contradict each other",
        ),
        (
            ["zero=2", "offload-param=cpu"],
            "-o offload-param=cpu and -o zero=2 contradict each other",
        ),
        (["gradient-accumulation=0"], "-o gradient-accumulation=0"),
        (["pass-config=deepspeed"], "there is no configuration to pass"),
        (["zero=4"], "zero takes 0|1|2|3"),
    ],
    ids=str,
)
def test_contradicting_options_are_refused(words, shown):
    assert shown in refused(*words)


def test_a_notice_says_that_accelerate_does_not_use_deepspeed_on_cpus():
    cpus = Topology(nodes=(Node(host="a", slots=2),), device="cpu")
    [shown] = configured("zero=2").notes_on(cpus)
    assert mentions(shown, "CPUs", "Accelerate", "Transformers", "-o zero")
    assert mentions(shown, "DeepSpeed", "one worker")
    assert "fail" not in shown, "it depends on the script, which nobody has read"
    assert configured("local-rank").notes_on(cpus) == ()
    assert (
        configured("zero=2").notes_on(Topology(nodes=(Node(host="a", slots=1),), device="cpu"))
        == ()
    )
    assert configured("config=d", "pass-config=deepspeed").notes_on(cpus) == ()


# --- .deepspeed_env


def test_the_env_file_here_overrides_the_one_at_home(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text("A=1\n")
    environ = {"HOME": str(home)}
    assert DeepSpeed.env_files(environ, str(here)) == [
        f"{home}/.deepspeed_env",
        f"{here}/.deepspeed_env",
    ]
    assert DeepSpeed.env_files(environ, str(home)) == [f"{home}/.deepspeed_env"]
    assert DeepSpeed.env_files(environ, str(tmp_path)) == [f"{home}/.deepspeed_env"]
    assert DeepSpeed.env_files({"HOME": "/nowhere"}, str(tmp_path)) == []


def test_ds_env_file_names_another_file_which_must_exist(tmp_path):
    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    (tmp_path / "mine").write_text("A=2\n")
    environ = {"HOME": "/nowhere", "DS_ENV_FILE": "mine"}
    assert DeepSpeed.env_files(environ, str(tmp_path)) == [f"{tmp_path}/mine"]
    assert DeepSpeed.env_files({"DS_ENV_FILE": f"{tmp_path}/mine"}, "/") == [f"{tmp_path}/mine"]
    with pytest.raises(ConfigError) as caught:
        DeepSpeed.env_files({"HOME": "/nowhere", "DS_ENV_FILE": "other"}, str(tmp_path))
    assert mentions(caught.value.message, "DS_ENV_FILE", "'other'")
    assert caught.value.hint == f"looked in /nowhere and {tmp_path}"


def test_ds_env_file_must_name_a_regular_file(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, kind in {"folder": "a folder", "pipe": "not a regular file"}.items():
        with pytest.raises(ConfigError) as caught:
            DeepSpeed.env_files({"HOME": "/nowhere", "DS_ENV_FILE": name}, str(tmp_path))
        assert caught.value.message == f"DS_ENV_FILE '{name}': {tmp_path}/{name} is {kind}"


def test_variables_of_another_launch_are_discarded():
    assert {"ACCELERATE_USE_FSDP", "ACCELERATE_CONFIG_DS_FIELDS"} <= set(configured().unwanted())
    assert "ACCELERATE_DEEPSPEED_CONFIG_FILE" not in configured("precision=bf16").unwanted(), (
        "it may be the user's"
    )
    assert "ACCELERATE_DEEPSPEED_CONFIG_FILE" in configured("zero=2").unwanted()
