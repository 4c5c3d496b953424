from __future__ import annotations

import pytest

from distlaunch.backends.accelerate import Accelerate
from distlaunch.backends.backend_options import chosen_options
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.topology import Node, Topology
from tests.facts import mentions

CPUS = Topology(nodes=(Node(host="a", slots=2),), device="cpu")
GPUS = Topology(nodes=(Node(host="a", slots=2, devices=("0", "1")),), device="cuda")
ELASTIC = Topology(
    nodes=(Node(host="a", slots=None), Node(host="b", slots=2)), device="auto", bounds=(1, 4)
)


def made(text: str | None, *words: str) -> Accelerate:
    files = [] if text is None else ["config=conf/a.yaml"]
    return Accelerate(
        chosen_options([*files, *words], Accelerate.options(), Accelerate.name),
        {"config": text or ""},
    )


def test_without_a_file_only_given_options_are_set():
    assert made(None).job_variables(GPUS) == {}
    assert made(None).job_variables(CPUS) == {"ACCELERATE_USE_CPU": "true"}
    words = ["mixed-precision=bf16", "dynamo-backend=inductor", "dynamo-mode=max-autotune", "debug"]
    assert made(None, *words, "gradient-accumulation-steps=4", "nccl-debug=warn").job_variables(
        GPUS
    ) == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "max-autotune",
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "NCCL_DEBUG": "WARN",
    }


def test_options_override_the_file():
    text = "distributed_type: MULTI_GPU\nmixed_precision: fp16\ndebug: true\ndynamo_config:\n  dynamo_backend: TVM\n"
    assert made(text).job_variables(GPUS)["ACCELERATE_DYNAMO_BACKEND"] == "TVM"
    variables = made(text, "mixed-precision=no", "dynamo-backend=no", "debug=off").job_variables(
        GPUS
    )
    assert variables["ACCELERATE_MIXED_PRECISION"] == "no"
    assert variables["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    assert variables["ACCELERATE_DEBUG_MODE"] == "false"


def test_unquoted_words_that_yaml_reads_as_false_keep_their_meaning():
    variables = made(
        "distributed_type: NO\nmixed_precision: no\ndynamo_config: {}\n"
    ).job_variables(GPUS)
    assert variables["ACCELERATE_MIXED_PRECISION"] == "no"


def test_use_cpu_is_not_set_with_deepspeed():
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 1\n  offload_param_nvme_path: /nvme\n"
    variables = made(text).job_variables(CPUS)
    assert "ACCELERATE_USE_CPU" not in variables
    assert variables["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"] == "/nvme", "launch forgets it"


FITTING = """\
distributed_type: MULTI_GPU
num_processes: 2
num_machines: 1
gpu_ids: 0, 1
"""


def test_a_matching_file_gives_no_notice():
    assert made(FITTING).notes == made(FITTING).notes_on(GPUS) == ()
    assert made(FITTING.replace("0, 1", "all")).notes_on(GPUS) == ()


@pytest.mark.parametrize(
    ("line", "note"),
    [
        (
            "num_processes: 8",
            "conf/a.yaml says num_processes: 8, which is not used: the job has 2 workers on 1 node",
        ),
        (
            "num_processes: 16\nnum_machines: 2",
            "says num_processes: 16 and num_machines: 2, which is not used: the job has 2 workers",
        ),
        ("gpu_ids: 0,3", "conf/a.yaml:2: gpu_ids: 0,3 is not used: --gpus"),
        (
            "num_machines: 2\nmain_process_ip: 10.0.0.1",
            "conf/a.yaml:3: main_process_ip: 10.0.0.1 is not used: --master-addr",
        ),
        ("main_process_port: 29500", "conf/a.yaml:2: main_process_port: 29500 is not used"),
        ("use_cpu: true", "is for CPUs, so the GPUs of these workers stay idle"),
        (
            "mpirun_config:\n  mpirun_hostfile: hosts",
            "conf/a.yaml:3: mpirun_hostfile is not used: --hostfile",
        ),
        (
            "deepspeed_config:\n  deepspeed_inclusion_filter: a",
            "conf/a.yaml:3: deepspeed_inclusion_filter is not used",
        ),
        ("enable_cpu_affinity: true", "--bind numa"),
    ],
)
def test_nodes_and_devices_of_the_file_are_compared_with_the_job(line, note):
    notes = made(f"distributed_type: MULTI_GPU\n{line}\n").notes_on(GPUS)
    assert any(note in reported for reported in notes), notes


def test_sizes_are_not_compared_where_they_may_change():
    assert made("distributed_type: NO\nnum_processes: 8\nnum_machines: 7\n").notes_on(ELASTIC) == ()


@pytest.mark.parametrize(
    ("kind", "note"),
    [("MULTI_GPU", "these workers run on CPUs"), ("FSDP", "supports FSDP on GPUs only")],
)
def test_a_file_for_gpus_gives_a_notice_if_workers_run_on_cpus(kind, note):
    (reported,) = made(f"distributed_type: {kind}\n").notes_on(CPUS)
    assert note in reported


@pytest.mark.parametrize(
    ("text", "why", "hint"),
    [
        ("num_processes: 2\n", "conf/a.yaml: distributed_type is missing", "MULTI_GPU"),
        (
            "distributed_type: MULTI_GPUS\n",
            "conf/a.yaml:1: 'MULTI_GPUS'",
            "did you mean MULTI_GPU?",
        ),
        ("distributed_type: XLA\n", "distlaunch does not support TPUs", None),
        (
            "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\n",
            "supported by accelerate launch only",
            "LOCAL_MACHINE",
        ),
        (
            "distributed_type: NO\nmixed_precision: bf-16\n",
            "conf/a.yaml:2: mixed_precision 'bf-16'",
            "bf16",
        ),
        (
            "distributed_type: NO\nnum_proceses: 2\n",
            "conf/a.yaml:2: 'num_proceses' is not known",
            "num_processes?",
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_versoin: 2\n",
            "conf/a.yaml:3: 'fsdp_versoin'",
            "fsdp_version?",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: on\n",
            "conf/a.yaml:2: fsdp_config takes names and values",
            None,
        ),
        (
            "distributed_type: NO\ndynamo_config:\n  dynamo_backend: inductr\n",
            "conf/a.yaml:3: dynamo_backend",
            "inductor?",
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_sync_module_states: false\n",
            "conf/a.yaml:3: fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states",
            "rank 0",
        ),
        (
            "distributed_type: NO\nmixed_precision: fp8\nfp8_config:\n  override_linear_precision: [true]\n",
            "conf/a.yaml:4: override_linear_precision needs three",
            None,
        ),
        (
            "distributed_type: NO\nfoo\n",
            "conf/a.yaml:2: not YAML: could not find expected ':'",
            None,
        ),
        ("", "conf/a.yaml: distributed_type is missing", None),
        (
            'distributed_type: FSDP\nfsdp_config:\n  fsdp_ignored_modules: "a\\0"\n',
            "FSDP_IGNORED_MODULES would be 'a\\x00', which no variable can hold",
            None,
        ),
        (
            '{"distributed_type": "FSDP", "fsdp_config": {"fsdp_ignored_modules": "\\ud800"}}',
            "no variable can hold",
            None,
        ),
    ],
)
def test_an_invalid_file_is_refused_with_its_line(text, why, hint):
    with pytest.raises(ConfigError) as caught:
        made(text)
    assert why in caught.value.message
    assert hint is None or hint in caught.value.hint


def test_an_invalid_number_is_refused_when_it_is_compared():
    with pytest.raises(ConfigError, match=r"conf/a\.yaml:2: num_processes .* 'two'"):
        made("distributed_type: NO\nnum_processes: two\n").notes_on(GPUS)


def test_keys_of_a_newer_accelerate_give_a_notice_and_are_ignored():
    backend = made("distributed_type: NO\nquantum_config:\n  x: 1\n")
    (notice,) = backend.notes
    assert mentions(notice, "conf/a.yaml:2", "'quantum_config'", "ignored")
    assert "quantum" not in str(backend.job_variables(GPUS)).lower()


def test_a_key_that_is_only_an_option_gives_a_notice_with_that_option():
    [shown] = made("distributed_type: NO\ngradient_accumulation_steps: 4\n").notes
    assert mentions(shown, "ignored", "-o gradient-accumulation-steps=N")


def test_only_the_first_of_many_unknown_keys_give_notices():
    notes = made(
        "distributed_type: NO\n" + "".join(f"zz_{number}: 1\n" for number in range(15_000))
    ).notes
    assert len(notes) == 11
    assert mentions(notes[-1], "conf/a.yaml", "14,990 more")


FSDP = "distributed_type: FSDP\nfsdp_config:\n  "
ZERO = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  "


@pytest.mark.parametrize(
    ("text", "why", "hint"),
    [
        (FSDP + "fsdp_sharding_strategy: 12\n", "not '12'", None),
        (FSDP + "fsdp_version: 7\n", "a.yaml:3: fsdp_version takes 1 or 2, not '7'", None),
        (
            FSDP + "fsdp_version:\n    a: 1\n",
            "a.yaml:3: fsdp_version takes one value, not names and values",
            None,
        ),
        (
            FSDP + "fsdp_sharding_strategy: FULL_SHRAD\n",
            "a.yaml:3: fsdp_sharding_strategy takes",
            "FULL_SHARD?",
        ),
        (
            FSDP + "fsdp_auto_wrap_policy: TRANSFORMER\n",
            "takes TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP",
            None,
        ),
        (
            FSDP + "fsdp_offload_params: banana\n",
            "fsdp_offload_params takes true or false, not 'banana'",
            None,
        ),
        (
            FSDP + "fsdp_min_num_params: 1e8\n",
            "fsdp_min_num_params takes a whole number, not '1e8'",
            None,
        ),
        (
            FSDP + "fsdp_transformer_layer_cls_to_wrap: [A, B]\n",
            "takes one value, not a list",
            "A,B",
        ),
        (ZERO + "zero_stage: 9\n", "a.yaml:3: zero_stage takes 0, 1, 2 or 3, not '9'", None),
        (
            ZERO + "gradient_clipping: banana\n",
            "gradient_clipping takes a number or auto, not 'banana'",
            None,
        ),
        (
            ZERO + "gradient_accumulation_steps: -1\n",
            "gradient_accumulation_steps takes a whole number or auto",
            None,
        ),
        (
            ZERO + "offload_param_device: gpu\n",
            "offload_param_device takes none, cpu or nvme, not 'gpu'",
            None,
        ),
        (
            "distributed_type: NO\ndynamo_config:\n  dynamo_use_dynamic: maybe\n",
            "takes true or false",
            None,
        ),
        (
            "distributed_type: MULTI_GPU\nparallelism_config:\n  parallelism_config_tp_size: two\n",
            "a whole",
            None,
        ),
    ],
)
def test_values_that_accelerate_rejects_are_refused(text, why, hint):
    with pytest.raises(ConfigError) as caught:
        made(text)
    assert why in caught.value.message
    assert hint is None or hint in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        FSDP
        + "fsdp_version: '2'\n  fsdp_reshard_after_forward: true\n  fsdp_sharding_strategy: 1\n",
        FSDP + "fsdp_reshard_after_forward: 1\n",
        FSDP + "fsdp_reshard_after_forward: full_shard\n  fsdp_backward_prefetch: NO_PREFETCH\n",
        FSDP
        + "fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_offload_params: yes\n  fsdp_min_num_params: 0\n",
        ZERO
        + "gradient_clipping: 1.0\n  gradient_accumulation_steps: auto\n  zero3_init_flag: false\n",
        ZERO + "gradient_clipping: auto\n  offload_optimizer_device: none\n  zero_stage: 3\n",
        ZERO + "gradient_clipping: 1e-2\n  gradient_accumulation_steps:\n",
    ],
)
def test_values_that_accelerate_accepts_are_accepted(text):
    assert made(text).notes == ()


def test_a_file_discards_variables_of_another_launch():
    unwanted = set(made(FSDP + "fsdp_version: 2\n").unwanted())
    assert {
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_USE_MEGATRON_LM",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
    } <= unwanted
    assert {
        "FSDP_TRANSFORMER_CLS_TO_WRAP",
        "FSDP_STATE_DICT_TYPE",
        "PARALLELISM_CONFIG_TP_SIZE",
    } <= unwanted
    assert {"ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_CONFIG_DS_FIELDS"} <= unwanted
    assert (
        not {
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "ACCELERATE_LOG_LEVEL",
            "ACCELERATE_DEBUG_MODE",
        }
        & unwanted
    )


def test_without_a_file_the_environment_is_the_configuration():
    assert made(None, "mixed-precision=bf16").unwanted() == ()


# --- the file that it names of DeepSpeed's

WITH_FILE = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {file}\n"


def looked_for(file: str, **variables: str) -> list[tuple[str, str]]:
    """Return the files to check, with their names."""
    backend = made(WITH_FILE.format(file=file))
    wanted: list[tuple[str, str]] = []
    backend.check_files(
        {**backend.job_variables(GPUS), **variables},
        lambda path, named: wanted.append((path, named)) or "{}",
    )
    return wanted


def test_deepspeeds_own_configuration_is_checked_and_named_with_its_line():
    assert looked_for("conf/ds.json") == [
        ("conf/ds.json", "conf/a.yaml:3: deepspeed_config_file: conf/ds.json")
    ]


@pytest.mark.parametrize(
    ("file", "variables"),
    [
        ("none", {}),
        ("", {}),
        ("""'{"zero_optimization": {"stage": 3}}'""", {}),
        ("eyJ6ZXJvX29wdGltaXphdGlvbiI6IHsic3RhZ2UiOiAzfX0=", {}),
        ("ds.json", {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "other.json"}),
    ],
    ids=[
        "as accelerate config has it for none",
        "nothing",
        "JSON",
        "base64",
        "another by the user's variable",
    ],
)
def test_no_file_is_checked_where_accelerate_reads_none(file, variables):
    assert looked_for(file, **variables) == []


def test_a_section_for_another_distributed_type_is_ignored():
    backend = made(WITH_FILE.format(file="ds.json").replace("DEEPSPEED", "FSDP"))
    backend.check_files(backend.job_variables(GPUS), lambda *_: pytest.fail("it is not read"))


@pytest.mark.parametrize(
    ("text", "why", "hint"),
    [
        ("{\n", "not JSON: Expecting", "Accelerate reads only JSON"),
        ("{\n  # Hjson\n  train_batch_size: 8\n}\n", "not JSON: Expecting", "not Hjson"),
        ("[]", "not a configuration of DeepSpeed", "train_batch_size"),
        ("[" * 100_000, "nested too deeply", None),
        ('{"a": "\udcff"}', "not UTF-8", None),
    ],
)
def test_deepspeeds_own_configuration_has_to_be_json(text, why, hint):
    backend = made(WITH_FILE.format(file="ds.json"))
    with pytest.raises(
        ConfigError, match=r"^conf/a\.yaml:3: deepspeed_config_file: ds\.json: "
    ) as caught:
        backend.check_files(backend.job_variables(GPUS), lambda *_: text)
    assert why in caught.value.message
    assert hint is None or hint in str(caught.value.hint)


def test_a_file_that_is_only_on_other_machines_is_not_checked():
    backend = made(WITH_FILE.format(file="ds.json"))
    backend.check_files(backend.job_variables(GPUS), lambda *_: None)


# --- what ranks above the file


def test_settings_override_keys_of_the_file_and_null_removes_one():
    text = (
        "distributed_type: FSDP\nnum_processes: 8\ndebug: true\n"
        "fsdp_config:\n  fsdp_version: 2\n  offload_params: true\n  fsdp_min_num_params: 5\n"
    )
    above = '{"fsdp_config": {"fsdp_offload_params": false, "version": 1}, "num_processes": null, "debug": null}'
    backend = made(text, f"settings={above}")
    variables = backend.job_variables(GPUS)
    assert (variables["FSDP_OFFLOAD_PARAMS"], variables["FSDP_VERSION"]) == ("false", "1")
    assert variables["FSDP_MIN_NUM_PARAMS"] == "5"
    assert "ACCELERATE_DEBUG_MODE" not in variables
    assert list(backend.notes_on(GPUS)) == []
    assert "conf/a.yaml says num_processes: 8" in next(iter(made(text).notes_on(GPUS)))


def test_a_setting_overrides_both_names_of_a_key():
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: true\n  offload_params: true\n"
    for name in ("fsdp_offload_params", "offload_params"):
        above = f'{{"fsdp_config": {{"{name}": false}}}}'
        assert made(text, f"settings={above}").job_variables(GPUS)["FSDP_OFFLOAD_PARAMS"] == "false"


def test_settings_work_without_a_file():
    above = '{"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}'
    variables = made(None, f"settings={above}").job_variables(GPUS)
    assert variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert variables["ACCELERATE_CONFIG_DS_FIELDS"] == ""  # which are the file's alone, there too
    assert made(None, "settings={}").job_variables(GPUS) == {}


@pytest.mark.parametrize(
    ("above", "message"),
    [
        ("fsdp", "-o settings takes JSON, not 'fsdp'"),
        ('{"distributed_type": ', "-o settings:1: not JSON: "),
        ('{"debug": true}', "-o settings: distributed_type is missing"),
        (
            '{"distributed_type": "FSDP", "fsdp_config": {"fsdp_versions": 2}}',
            "-o settings: 'fsdp_versions' is not",
        ),
        (
            '{"distributed_type": "FSDP", "fsdp_config": 2}',
            "-o settings: fsdp_config takes names and values",
        ),
    ],
)
def test_settings_that_are_wrong_are_named_as_such(above, message):
    with pytest.raises(ConfigError) as caught:
        made(None, f"settings={above}")
    assert caught.value.message.startswith(message)


def test_a_wrong_setting_is_not_reported_with_a_line_of_the_file():
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
    with pytest.raises(ConfigError) as caught:
        made(text, 'settings={"fsdp_config": {"fsdp_version": 3}}')
    assert caught.value.message == "conf/a.yaml: fsdp_version takes 1 or 2, not '3'"
