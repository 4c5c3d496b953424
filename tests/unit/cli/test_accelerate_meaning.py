from __future__ import annotations

import json

import pytest

from distlaunch.backends.accelerate_config import read_config
from distlaunch.backends.config_file import read_document
from distlaunch.cli.compat.accelerate.command import accelerate, configuration
from distlaunch.cli.compat.accelerate.options import OPTIONS
from distlaunch.cli.compat.accelerate.translate import translate
from distlaunch.cli.compat.drop_in import Translation
from distlaunch.cli.parser import HelpRequested, scan
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.topology import CpuInventory, Gpu, GpuInventory
from distlaunch.planning.facts import Facts
from distlaunch.planning.local_topology import local_topology
from tests.facts import mentions

TWO_MACHINES = {
    "distributed_type": "MULTI_GPU",
    "num_machines": 2,
    "num_processes": 8,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29999,
}


def meaning(*words: str, file: dict | None = None, **environ: str) -> Translation:
    given, rest = scan([*words, "s.py", "a"], OPTIONS)
    return translate(
        given,
        rest,
        environ,
        None if file is None else read_config(read_document(json.dumps(file), "f")),
    )


def options(*words: str, file: dict | None = None, **environ: str):
    return meaning(*words, file=file, **environ).options


def settings(*words: str, file: dict | None = None) -> dict:
    return json.loads(
        dict(word.split("=", 1) for word in options(*words, file=file).opt)["settings"]
    )


def refused(*words: str, file: dict | None = None) -> ConfigError:
    with pytest.raises(UsageError) as caught:
        meaning(*words, file=file)
    return caught.value


def test_a_plain_command_has_all_gpus_of_this_machine():
    found = meaning()
    assert found.notices == ()
    assert (found.options.backend, found.options.script, found.options.script_args) == (
        "accelerate",
        "s.py",
        ("a",),
    )
    assert (found.options.source, found.options.hosts, found.options.device) == (
        "flags",
        None,
        "auto",
    )
    assert found.options.opt == (
        "config=none",
        'settings={"distributed_type": "NO", "use_cpu": false}',
    )


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--num_processes", "4"], "hosts", "localhost:4"),
        (["--num-processes=4"], "hosts", "localhost:4"),
        (["--num_processes", "1"], "procs_per_node", 1),
        (["--num_processes", "1"], "whole_nodes", True),
        (["--cpu"], "num_procs", 1),
        (["--cpu", "--num_processes", "3"], "num_procs", 3),
        (["--cpu"], "device", "cpu"),
        (["--gpu_ids", "0,2"], "gpus", "0,2"),
        (["--gpu_ids", "0,2", "--num_processes", "2"], "num_gpus", 2),
        (["--gpu_ids", "all"], "gpus", None),
        (["--gpu_ids", "0", "--cpu"], "gpus", None),
        (["--main_process_port", "29501"], "master_port", 29501),
        (["--main_process_port", "0"], "master_port", None),
        (["--num_machines", "1", "--machine_rank", "0"], "rendezvous", None),
        (["-m"], "module", True),
        (["--no_python"], "no_python", True),
        (["-q"], "quiet", True),
        (["--log_dir", "logs"], "log_dir", "logs"),
        (["--max_restarts", "3"], "max_restarts", 3),
        (["--num_cpu_threads_per_process", "3"], "env", ("OMP_NUM_THREADS=3",)),
        (["--enable_cpu_affinity", "--env", "A=1"], "env", ("ACCELERATE_CPU_AFFINITY=1", "A=1")),
        (["--hosts", "a:4,b:4", "--num_processes", "6"], "num_gpus", 6),
        (["--hosts", "a:4,b:4", "--num_machines", "2"], "num_nodes", 2),
        (["--deepspeed_hostfile", "hosts"], "hostfile", "hosts"),
        (["--deepspeed_inclusion_filter", "a"], "include", "a"),
        (["--grace", "5"], "grace", 5.0),
    ],
)
def test_each_option_becomes_the_expected_options(words, field, value):
    assert getattr(options(*words), field) == value


def test_one_process_sees_all_gpus_that_there_are_or_those_chosen():
    gpus = tuple(Gpu(index=index, uuid=f"GPU-{index}", name="H100") for index in range(3))
    facts = Facts(
        environ={},
        cwd="/w",
        hostname="a",
        python="/python",
        cpus=CpuInventory(allowed=(0,), online=1),
        gpus=GpuInventory(gpus=gpus, source="nvml"),
        paths={},
        texts={},
        programs={},
    )

    def masks(*words):
        (node,) = local_topology(options(*words), facts).nodes
        return node.slots, node.masks

    assert masks("--num_processes", "1") == (1, (("0", "1", "2"),))
    assert masks("--num_processes", "1", "--gpu_ids", "2,0") == (1, (("2", "0"),))
    assert masks("--num_processes", "2", "--gpu_ids", "2,0") == (2, (("2", "0"),) * 2)
    assert masks() == (3, (("0", "1", "2"),) * 3)
    assert masks("--cpu") == (1, ((),))


def test_machines_that_each_have_a_launcher_have_the_rendezvous_on_the_first():
    found = options(
        "--num_machines",
        "2",
        "--num_processes",
        "8",
        "--machine_rank",
        "1",
        "--main_process_ip",
        "h",
    )
    assert (found.num_nodes, found.node_rank, found.gpus_per_node) == (2, 1, 4)
    assert (found.rendezvous, found.join_timeout) == ("h:29500", 600.0)
    found = options(file=TWO_MACHINES)
    assert (found.num_nodes, found.node_rank, found.gpus_per_node) == (2, 1, 4)
    assert found.rendezvous == "10.0.0.1:29999"
    found = options("--machine_rank", "0", "--cpu", "--main_process_ip", "::1", file=TWO_MACHINES)
    assert (found.node_rank, found.procs_per_node, found.rendezvous) == (0, 4, "[::1]:29999")


def test_c10d_machines_are_numbered_as_they_come_unless_one_gives_its_rank():
    file = {**TWO_MACHINES, "rdzv_backend": "c10d"}
    assert options(file=file).node_rank is None
    assert options("--machine_rank", "0", file=file).node_rank == 0


def test_a_typed_list_of_hosts_has_the_sizes_and_not_the_file():
    found = options("--hosts", "a:4,b:4", file=TWO_MACHINES)
    assert (found.num_gpus, found.num_nodes, found.rendezvous, found.node_rank) == (
        None,
        None,
        None,
        None,
    )
    (notice,) = meaning("--hosts", "a", "--machine_rank", "0").notices
    assert mentions(notice, "--machine_rank")


def test_deepspeeds_own_list_in_the_file_is_read_where_its_launcher_would_read_it():
    section = {"zero_stage": 2, "deepspeed_hostfile": "hosts", "deepspeed_exclusion_filter": "b"}
    file = {**TWO_MACHINES, "distributed_type": "DEEPSPEED", "deepspeed_config": section}
    found = options(file=file)
    assert (found.hostfile, found.exclude, found.rendezvous) == ("hosts", "b", None)
    assert settings(file=file)["deepspeed_config"]["deepspeed_hostfile"] is None
    section["deepspeed_multinode_launcher"] = "standard"
    assert (options(file=file).hostfile, options(file=file).rendezvous) == (None, "10.0.0.1:29999")


def test_the_file_says_what_the_command_line_does_not():
    file = {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "gpu_ids": "1,3",
        "main_process_port": 29500,
    }
    found = options(file=file)
    assert (found.gpus, found.num_gpus, found.master_port) == ("1,3", 2, None)
    assert options("--cpu", file=file).num_procs == 1  # it counts GPUs
    assert options("--cpu", "--num_processes", "3", file=file).num_procs == 3
    assert options("--num_processes", "4", "--gpu_ids", "all", file=file).hosts == "localhost:4"
    assert settings("--num_processes", "4", file=file)["num_processes"] is None
    assert options(file={"distributed_type": "NO"}).procs_per_node == 1
    assert (
        options(
            file={"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 3}
        ).num_procs
        == 3
    )


def test_one_way_is_the_command_lines_or_the_files():
    fsdp = {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_tp_size": 2}}
    assert settings("--use_fsdp")["distributed_type"] == "FSDP"
    assert settings(file=fsdp)["distributed_type"] == "FSDP"
    assert settings("--multi_gpu", file=fsdp)["distributed_type"] == "MULTI_GPU"
    assert settings("--cpu", file=fsdp)["distributed_type"] == "MULTI_CPU"
    assert "parallelism_config" not in settings(file=fsdp)
    assert settings("--use_fsdp", file=fsdp)["parallelism_config"] is None
    assert "parallelism_config" not in settings("--use_fsdp", "--use_parallelism_config", file=fsdp)
    assert settings("--use_fsdp", "--use_parallelism_config")["parallelism_config"] == {
        "dp_replicate_size": 1
    }


def test_options_of_a_section_are_set_in_it():
    assert settings("--use_fsdp", "--fsdp_version", "2", "--dynamo_use_dynamic") | {
        "use_cpu": ...
    } == {
        "distributed_type": "FSDP",
        "use_cpu": ...,
        "fsdp_config": {"version": "2"},
        "dynamo_config": {"use_dynamic": True},
    }
    assert settings("--use_deepspeed", "--gradient_clipping", "1")["deepspeed_config"] == {
        "gradient_clipping": 1.0
    }


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        (
            ["-t", "3", "--same_network"],
            "without effect here: --tee, --same_network (see distlaunch accelerate launch",
        ),
        (["--rdzv_backend", "etcd"], "without effect here: --rdzv_backend 'etcd' (see"),
        (["--fsdp_version", "2"], "without effect: --fsdp_version (of --use_fsdp)"),
        (
            ["--gradient_accumulation_steps", "2"],
            "without effect: --gradient_accumulation_steps (of --use_deepspeed)",
        ),
        (
            ["--use_deepspeed", "--dynamo_mode", "default"],
            "without effect: --dynamo_mode (of jobs without DeepSpeed)",
        ),
        (["--fp8_margin", "2"], "without effect: --fp8_margin (of --mixed_precision fp8)"),
        (
            ["--main_process_ip", "h"],
            "--main_process_ip has no effect: there is one machine, this one",
        ),
        (
            ["--cpu", "--num_processes", "2"],
            "2 workers are started; accelerate launch would start one, and leave",
        ),
    ],
)
def test_options_without_effect_or_with_another_are_reported_once(words, notice):
    (found,) = meaning(*words).notices
    assert found.startswith(notice)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tpu"], "--tpu: TPUs are started by accelerate launch itself"),
        (["--vm", "a"], "--vm: TPUs are started by accelerate launch itself"),
        (
            ["--aws_access_key_id", "a"],
            "--aws_access_key_id: SageMaker is asked by accelerate launch itself",
        ),
        (["--mpirun_hostfile", "a"], "--mpirun_hostfile: no MPI is needed here"),
        (["--cpu", "--use_fsdp"], "--cpu and --use_fsdp exclude each other"),
        (["--use_parallelism_config"], "--use_parallelism_config needs --use_fsdp"),
        (["--machine_rank", "1"], "--machine_rank 1: there is one machine"),
        (["--num_machines", "2"], "--num_machines 2: where they meet is not said"),
        (
            ["--num_machines", "2", "--main_process_ip", "h"],
            "--num_machines 2: --num_processes is missing",
        ),
        (
            ["--num_machines", "2", "--main_process_ip", "h", "--num_processes", "3"],
            "--num_machines 2: --num_processes 3 is not the same number on each machine",
        ),
        (
            ["--num_machines", "2", "--main_process_ip", "h", "--num_processes", "4"],
            "--num_machines 2: which of them this is is not said",
        ),
        (["--zero_stage", "7"], "--zero_stage takes 0, 1, 2 or 3, not '7'"),
        (
            ["--megatron_lm_hidden_dropout", "x"],
            "--megatron_lm_hidden_dropout takes a number, not 'x'",
        ),
    ],
)
def test_unsupported_or_contradictory_options_are_refused_by_name(words, message):
    error = refused(*words)
    assert error.message == message
    assert (error.hint is None) is ("takes" in message)


def test_names_are_not_cut_short_as_accelerate_wants_them_whole():
    with pytest.raises(UsageError, match="unknown option '--num-proc'"):
        meaning("--num_proc", "2")


def test_the_file_is_the_named_one_or_the_default_one_but_for_cpu(tmp_path):
    usual, named = tmp_path / "accelerate" / "default_config.yaml", tmp_path / "mine.yaml"
    usual.parent.mkdir()
    usual.write_text("distributed_type: FSDP\n")
    named.write_text("distributed_type: MULTI_GPU\n")
    environ = {"HF_HOME": str(tmp_path)}

    def kind(given, environ):
        found, _ = configuration(given, environ, str(tmp_path))
        return found and found.kind

    assert kind({}, environ) == "FSDP"
    assert kind({"config_file": ["mine.yaml"]}, environ) == "MULTI_GPU"
    assert kind({"cpu": ["1"]}, environ) is None
    assert kind({"opt": ["config=none"]}, environ) is None
    assert kind({"cpu": ["1"], "config_file": ["mine.yaml"]}, environ) == "MULTI_GPU"
    assert kind({}, {"HF_HOME": str(tmp_path / "none")}) is None
    with pytest.raises(ConfigError, match=r"--config_file 'none\.yaml': No such file"):
        kind({"config_file": ["none.yaml"]}, environ)


@pytest.mark.parametrize("word", ["config=x.yaml", "settings={}"])
def test_the_backends_own_words_for_it_are_refused(word, tmp_path):
    with pytest.raises(UsageError, match=f"-o .*{word}") as caught:
        accelerate(["launch", "-o", word, "s.py"], {"HF_HOME": str(tmp_path)})
    assert caught.value.hint == "--config_file FILE"


@pytest.mark.parametrize(
    "word", ["config", "env", "test", "estimate-memory", "merge-weights", "tpu-config", "lunch"]
)
def test_other_words_of_accelerate_are_answered_with_its_own_command(word):
    with pytest.raises(UsageError, match=f"accelerate {word}") as caught:
        accelerate([word], {})
    assert mentions(caught.value.hint, f"-m accelerate.commands.accelerate_cli {word}")


def test_no_word_is_an_error_and_help_is_asked_for_by_either_word():
    with pytest.raises(UsageError, match="accelerate what") as caught:
        accelerate([], {})
    assert caught.value.hint == "distlaunch accelerate launch [OPTIONS] SCRIPT [ARGS]..."
    for words in (["--help"], ["launch", "-h"], ["launch", "--cpu", "--help"]):
        with pytest.raises(HelpRequested):
            accelerate(words, {})
