"""Command lines of Accelerate's own launcher, under that and under ours: variables and number of
workers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from distlaunch.backends.accelerate import Accelerate
from distlaunch.backends.accelerate_config import read_config
from distlaunch.backends.backend_options import chosen_options
from distlaunch.backends.config_file import read_document
from distlaunch.cli.compat.accelerate.options import OPTIONS, OWN_OPTIONS
from distlaunch.cli.compat.accelerate.translate import translate
from distlaunch.cli.parser import scan
from distlaunch.core.model.topology import Node, Topology
from tests.facts import mentions
from tests.ports import free_port

PATIENCE_S = 220.0
PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 2
num_machines: 1
machine_rank: 0
main_process_port: 0
mixed_precision: bf16
dynamo_config:
  dynamo_backend: EAGER
fsdp_config:
  fsdp_version: 2
  offload_params: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
parallelism_config:
  parallelism_config_dp_shard_size: 2
"""
DEEPSPEED = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_processes: 2
num_machines: 1
mixed_precision: fp16
deepspeed_config:
  zero_stage: 3
  offload_param_device: cpu
"""

# --- what a command line sets

SET = [
    "",
    "--mixed_precision fp16 --debug",
    "--mixed_precision fp8 --fp8_backend te --fp8_margin 2 --fp8_format E4M3 --fp8_use_autocast_during_eval",
    "--multi_gpu --num_processes 2 --dynamo_backend inductor --dynamo_mode max-autotune --dynamo_use_fullgraph",
    "--multi_gpu --num_processes 2 --num-cpu-threads-per-process 3 --enable_cpu_affinity",
    "--use_fsdp --num_processes 2",
    (
        "--use_fsdp --num_processes 2 --fsdp_version 2 --fsdp_offload_params TRUE --fsdp_min_num_params 20"
        " --fsdp_transformer_layer_cls_to_wrap A,B --fsdp-state-dict-type SHARDED_STATE_DICT"
    ),
    "--use_fsdp --num_processes 2 --use_parallelism_config",
    (
        "--use_fsdp --num_processes 4 --use_parallelism_config --parallelism_config_cp_size 2"
        " --parallelism_config_dp_shard_size=2"
    ),
    "--use_megatron_lm --num_processes 2 --megatron_lm_tp_degree 2 --megatron_lm_gradient_clipping 2",
    "--use_deepspeed --num_processes 2",
    (
        "--use_deepspeed --num_processes 2 --zero_stage 3 --offload_optimizer_device CPU --gradient_clipping 1"
        " --gradient_accumulation_steps 4 --zero3_init_flag True --deepspeed_config_file ds.json --mixed_precision fp16"
    ),
    "--config_file fsdp.yaml",
    "--config_file fsdp.yaml --fsdp_offload_params false --mixed_precision no --dynamo_backend inductor",
    "--config_file fsdp.yaml --use_fsdp",
    "--config_file fsdp.yaml --multi_gpu --fsdp_version 1",
    "--config_file fsdp.yaml --cpu",
    "--config_file fsdp.yaml --parallelism_config_tp_size 2",
    "--config_file deepspeed.yaml",
    "--config_file deepspeed.yaml --zero_stage 2 --gradient_clipping 0.5",
    "--config_file deepspeed.yaml --mixed_precision no",
    "--config_file deepspeed.yaml --use_fsdp",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with configuration files in it, where the job is started."""
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    (tmp_path / "deepspeed.yaml").write_text(DEEPSPEED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def theirs(words: list[str]) -> dict[str, str]:
    """Return the variables that Accelerate's launcher adds to the environment of a worker."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    args = launch.launch_command_parser().parse_args([*words, "s.py"])
    with (
        patch.dict(os.environ, {}, clear=True),
        patch.object(prepare, "is_fp8_available", lambda: True),
        patch.object(launch, "default_config_file", "/nowhere/default_config.yaml"),
    ):
        args, defaults, precision_of_file = launch._validate_launch_command(args)
        args.main_process_port = 0  # else it is tried
        if args.use_deepspeed and not args.cpu:
            fields = list(defaults.deepspeed_config) if defaults else []
            fields += ["mixed_precision"] if precision_of_file else []
            args.deepspeed_fields_from_accelerate_config = ",".join(fields)
            return prepare.prepare_deepspeed_cmd_env(args)[1]
        if (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
            return prepare.prepare_multi_gpu_env(args)
        return prepare.prepare_simple_launcher_cmd_env(args)[1]


def ours(words: list[str]) -> dict[str, str]:
    """Return the variables of our backend for the same command line."""
    given, rest = scan([*words, "s.py"], OPTIONS)
    path = given.get("config_file", [None])[-1]
    text = None if path is None else Path(path).read_text()
    options = translate(
        given, rest, {}, None if text is None else read_config(read_document(text, path))
    ).options
    chosen = chosen_options(options.opt, Accelerate.options(), "accelerate")
    if text is None:
        assert chosen.pop("config") == "none"
    device = "cpu" if options.device == "cpu" else "cuda"
    backend = Accelerate(chosen, {} if text is None else {"config": text})
    variables = backend.job_variables(Topology(nodes=(Node(host="a", slots=2),), device=device))
    return {**variables, **dict(word.split("=", 1) for word in options.env)}


def of_accelerate(variables) -> dict[str, str]:
    """Leave out the launcher's own variables, and whether workers use CPUs if they do not."""
    found = {name: value for name, value in variables.items() if name.startswith(PREFIXES)}
    if found.get("ACCELERATE_USE_CPU", "").lower() != "true":
        found.pop("ACCELERATE_USE_CPU", None)
    else:
        found["ACCELERATE_USE_CPU"] = "true"
    return found


@pytest.mark.parametrize("line", SET)
def test_a_command_line_sets_what_accelerate_launch_sets(line, folder):
    words = line.split()
    assert of_accelerate(ours(words)) == of_accelerate(theirs(words))


def test_every_option_of_its_launcher_is_known_here_and_of_our_own_for_it_no_other():
    from accelerate.commands.launch import launch_command_parser

    written = {
        flag.replace("_", "-")
        for action in launch_command_parser()._actions
        for flag in action.option_strings
    }
    assert "--num-processes" in written
    assert written - {flag for option in OPTIONS for flag in option.all_flags} == {"-h", "--help"}
    assert {flag for option in OWN_OPTIONS for flag in option.flags} - written == set()


# --- what a command line starts

STARTED = [
    "--cpu {script} --cpu -x 'a b'",
    "--cpu -m show 1",
    "--no_python --cpu {python} {script}",
    (
        "--multi_gpu --num-processes=2 --main_process_port 0 --role trainer --max_restarts 2"
        " --num_cpu_threads_per_process 3 --tee 0 {script} --lr 1"
    ),
    "--config_file fsdp.yaml {script}",
]
SHOW = """\
import json, os, sys
rank = os.environ.get("RANK", "0")
with open(os.path.join(os.environ["GOT"], rank), "w") as file:
    json.dump([dict(os.environ), sys.argv[1:]], file)
"""
OF_RANKS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
)
"""What torchrun's agent, which Accelerate has for several processes, tells each."""


def got(folder) -> list[tuple[dict[str, str], list[str]]]:
    """Return the environment and the arguments of each worker, by rank."""
    return [tuple(json.loads((folder / name).read_text())) for name in sorted(os.listdir(folder))]


@pytest.mark.timeout(480)
@pytest.mark.parametrize("line", STARTED)
def test_workers_get_what_accelerate_launch_gives_them(line, folder, distlaunch):
    script = folder / "show.py"
    script.write_text(SHOW)
    words = shlex.split(line.format(script=script, python=sys.executable))
    by_them, by_us = folder / "theirs", folder / "ours"
    by_them.mkdir()
    by_us.mkdir()
    env = {"HF_HOME": str(folder), "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *words]
    subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **env, "GOT": str(by_them)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )
    result = distlaunch.run(
        ["accelerate", "launch", *words], PATIENCE_S, env={**env, "GOT": str(by_us)}, cwd=folder
    )
    assert result.returncode == 0, result.stderr
    expected, found = got(by_them), got(by_us)
    assert [arguments for _, arguments in found] == [arguments for _, arguments in expected]
    for (mine, _), (other, _) in zip(found, expected, strict=True):
        of_cpus = (
            {} if "ACCELERATE_USE_CPU" in of_accelerate(other) else {"ACCELERATE_USE_CPU": "true"}
        )
        assert (
            of_accelerate(mine) == of_accelerate(other) | of_cpus
        )  # there is no GPU: it says so only after --cpu
        reported = OF_RANKS if len(expected) > 1 else ()
        assert {name: mine.get(name) for name in reported} == {
            name: other.get(name) for name in reported
        }
        if "threads" in line:
            assert mine["OMP_NUM_THREADS"] == other["OMP_NUM_THREADS"] == "3"


@pytest.mark.timeout(480)
def test_machines_that_each_have_a_launcher_share_the_number_of_processes(distlaunch, folder):
    script = folder / "show.py"
    script.write_text(SHOW)
    (folder / "got").mkdir()
    words = [
        "accelerate",
        "launch",
        "--cpu",
        "--num_machines",
        "2",
        "--num_processes",
        "4",
        "--main_process_ip",
    ]
    port = str(free_port())
    words += ["127.0.0.1", "--main_process_port", port, "--machine_rank"]
    env = {"HF_HOME": str(folder), "GOT": str(folder / "got")}
    both = [distlaunch.start([*words, str(rank), script], env=env, cwd=folder) for rank in range(2)]
    for launcher in both:
        result = launcher.wait(PATIENCE_S)
        assert result.returncode == 0, result.stderr
    found = [environ for environ, _ in got(folder / "got")]
    assert [
        (each["RANK"], each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["GROUP_RANK"])
        for each in found
    ] == [(str(rank), "4", "2", str(rank // 2)) for rank in range(4)]


def test_a_configuration_that_is_a_pipe_counts_as_a_file_does(distlaunch, folder):
    script = folder / "show.py"
    script.write_text(SHOW)
    (folder / "got").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    words = ["accelerate", "launch", "--num_processes", "1", "--config_file", "pipe.yaml", script]
    env = {"HF_HOME": str(folder), "GOT": str(folder / "got")}
    launcher = distlaunch.start(words, env=env, cwd=folder)
    (folder / "pipe.yaml").write_text(
        "distributed_type: MULTI_CPU\nuse_cpu: true\nmixed_precision: bf16\n"
    )
    result = launcher.wait(PATIENCE_S)
    assert result.returncode == 0, result.stderr
    [(environ, _)] = got(folder / "got")
    assert environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_a_link_that_has_accelerates_name_is_this_command(distlaunch, folder):
    link = folder / "accelerate"
    link.write_text(f"#!{sys.executable}\nfrom distlaunch.__main__ import main\nmain()\n")
    link.chmod(0o755)
    done = subprocess.run(
        [link, "config"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert mentions(error, "error", "accelerate config")
    assert mentions(hint, "hint", "python -m accelerate.commands.accelerate_cli config")
