from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.backends.base import Backend
from distlaunch.backends.registry import find_backend
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.gpus import Gpu, GpuInventory
from distlaunch.core.model.layout import TORCHRUN, TRAIN
from distlaunch.core.model.node import CpuInventory
from distlaunch.core.model.plan import LaunchPlan
from distlaunch.core.model.record import replace
from distlaunch.core.model.topology import Node, Topology
from distlaunch.core.model.variables import SET_FOR_WORKERS
from distlaunch.resolve.options import TrainOptions
from distlaunch.resolve.plan import bind, build_plan
from distlaunch.resolve.sources.local import local_topology

TWO = GpuInventory(gpus=(Gpu(index=0, numa_node=0), Gpu(index=1, numa_node=1)), source="nvml")


def plan(make_facts, *, topology=None, facts=None, backend="pytorch-ddp", **options) -> LaunchPlan:
    chosen = TrainOptions(**{"script": "train.py", "num_procs": 2, **options})
    facts = make_facts(**(facts or {}))
    return build_plan(
        chosen,
        facts,
        topology or local_topology(chosen, facts),
        find_backend(backend)({}, {}),
        job_id="job-1",
        run_dir="/r/job-1",
    )


def refused(make_facts, *, facts=None, **options) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(make_facts, facts=facts, **options)
    assert "\n" not in caught.value.message
    return caught.value


def variables(planned: LaunchPlan, rank: int = 0) -> dict[str, str]:
    return {**planned.shared_env, **planned.workers[rank].env}


def test_a_variable_longer_than_linux_takes_is_refused_by_its_name(make_facts):
    most = 131_071 - len("LONG=")
    assert plan(make_facts, env=("LONG=" + "é" * (most // 2),))
    why = refused(make_facts, env=("LONG=" + "x" * (most + 1),)).message
    assert why == "--env LONG: with 131,072 bytes it is too long, Linux takes 131,071 of one variable (NAME=VALUE)"
    texts = {"f.env": "LONG=" + "x" * 200_000}
    assert refused(make_facts, env_file=("f.env",), facts={"texts": texts}).message.startswith(
        "LONG in f.env: with 200,005"
    )


def test_a_variable_of_a_backend_may_not_be_too_long_either(make_facts):
    class Long(Backend):
        name = "long"

        def job_variables(self, topology):
            return {"CLASSES": "Block," * 50_000}

    chosen, facts = TrainOptions(script="train.py", num_procs=1), make_facts()
    with pytest.raises(ConfigError, match=r"^CLASSES, which --backend long sets: with 300,008 bytes it is too long"):
        build_plan(chosen, facts, local_topology(chosen, facts), Long({}, {}), job_id="j", run_dir="/r")


# --- what contradicts a backend


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_what_is_inherited_against_a_backend_is_left_out_and_told_of(make_facts, name):
    environ = {name: "true", "ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    planned = plan(make_facts, backend="fsdp", facts={"environ": environ})
    assert name not in variables(planned)
    assert variables(planned)["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert variables(planned)["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT", "the user's, as no option says otherwise"
    (note,) = (note for note in planned.notes if name in note)
    assert note == f"{name} is set here and contradicts --backend fsdp: workers do not get it (--env NAME passes it on)"


def test_what_contradicts_a_backend_can_be_given_all_the_same(make_facts):
    environ = {"ACCELERATE_USE_DEEPSPEED": "true"}
    planned = plan(make_facts, backend="fsdp", facts={"environ": environ}, env=("ACCELERATE_USE_DEEPSPEED",))
    assert variables(planned)["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert not any("ACCELERATE" in note for note in planned.notes)


@pytest.mark.parametrize("backend", ["pytorch-ddp", "accelerate"])
def test_what_the_user_exports_for_accelerate_reaches_it(make_facts, backend):
    environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "bf16"}
    planned = plan(make_facts, backend=backend, facts={"environ": environ})
    assert environ.items() <= variables(planned).items()
    assert not any("ACCELERATE" in note for note in planned.notes)


# --- what the user gives


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("horovod", "HOROVOD_RANK"),
        ("horovod", "HOROVOD_HOSTNAME"),
        ("deepspeed", "LOCAL_SIZE"),
        ("tensorflow", "TF_CONFIG"),
    ],
)
def test_what_a_backend_sets_for_each_worker_cannot_be_given(make_facts, backend, name):
    said = f"--env {name}: --backend {backend} sets {name} for each worker"
    assert refused(make_facts, backend=backend, env=("A=1", f"{name}=7")).message == said
    file = refused(make_facts, backend=backend, env_file=("/w/f",), facts={"texts": {"/w/f": f"{name}=7\n"}})
    assert file.message == said.replace(f"--env {name}", f"{name} in /w/f")
    assert plan(make_facts, env=(f"{name}=7",)).given_env == {name: "7"}, "another backend has no use for it"


def test_what_a_backend_sets_for_all_can_be_given(make_facts):
    assert variables(plan(make_facts, backend="horovod", env=("HOROVOD_CONTROLLER=x",)))["HOROVOD_CONTROLLER"] == "x"


# --- what workers get


def test_a_worker_gets_everything_that_the_design_names(make_facts):
    bound = bind(plan(make_facts, max_restarts=3), attempt=2, master_port=29511)
    assert variables(bound, 1) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "TORCHELASTIC_RUN_ID": "job-1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/r/job-1/attempt-2/rank-1.error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "8",
        "DISTLAUNCH_JOB_ID": "job-1",
        "DISTLAUNCH_ATTEMPT": "2",
        "DISTLAUNCH_BACKEND": "pytorch-ddp",
        "DISTLAUNCH_RUN_DIR": "/r/job-1",
    }


def test_everything_that_cannot_be_given_is_set_but_for_what_the_agent_adds(make_facts):
    bound = bind(plan(make_facts), attempt=0, master_port=1)
    descriptors = {"DISTLAUNCH_PROGRESS_FD", "DISTLAUNCH_STACKS_FD", "DISTLAUNCH_WARM_FD"}
    chosen = {"DISTLAUNCH_BACKEND_OPTIONS"}  # with options alone
    assert variables(bound).keys() >= SET_FOR_WORKERS - descriptors - chosen - {"DISTLAUNCH_COOKIE", "DISTLAUNCH_BOOT"}


def test_ranks_are_contiguous_over_unequal_nodes_in_topology_order(make_facts):
    nodes = (Node(host="a", slots=1), Node(host="b", slots=3), Node(host="c", slots=2))
    planned = plan(make_facts, topology=Topology(nodes=nodes, device="cpu"))
    assert planned.world_size == 6
    assert [(w.rank, w.node_rank, w.local_rank) for w in planned.workers] == [
        (0, 0, 0), (1, 1, 0), (2, 1, 1), (3, 1, 2), (4, 2, 0), (5, 2, 1),
    ]  # fmt: skip
    fifth = variables(planned, 4)
    assert {name: fifth[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE")} == {
        "RANK": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "2", "GROUP_WORLD_SIZE": "3",
    }  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES" not in fifth


def test_isolated_workers_have_local_rank_0_and_their_own_gpu(make_facts):
    planned = plan(make_facts, facts={"gpus": TWO}, num_procs=None, isolate_gpus=True)
    seen = [(variables(planned, r)["LOCAL_RANK"], variables(planned, r)["CUDA_VISIBLE_DEVICES"]) for r in (0, 1)]
    assert seen == [("0", "0"), ("0", "1")]
    assert [worker.local_rank for worker in planned.workers] == [0, 1]


def test_workers_share_the_mask_otherwise(make_facts):
    planned = plan(make_facts, facts={"gpus": TWO}, num_procs=None)
    seen = [(variables(planned, r)["LOCAL_RANK"], variables(planned, r)["CUDA_VISIBLE_DEVICES"]) for r in (0, 1)]
    assert seen == [("0", "0,1"), ("1", "0,1")]


@pytest.mark.parametrize(
    "name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONUNBUFFERED", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS"]
)
def test_a_default_gives_way_to_the_environment_and_to_the_user(make_facts, name):
    assert variables(plan(make_facts, facts={"environ": {name: "theirs"}}))[name] == "theirs"
    assert variables(plan(make_facts, env=(f"{name}=given",)))[name] == "given"
    assert variables(plan(make_facts, facts={"environ": {name: "theirs"}}, env=(f"{name}=given",)))[name] == "given"


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_cpu_workers_see_no_gpu_by_any_mask_that_is_set_outside(make_facts, name):
    seen = variables(plan(make_facts, facts={"environ": {name: "0,1"}}))
    assert (seen["CUDA_VISIBLE_DEVICES"], seen[name]) == ("", "-1")


def test_what_is_given_wins_over_what_is_inherited(make_facts):
    planned = plan(make_facts, facts={"environ": {"A": "1", "B": "1", "RANK": "7"}}, env=("A=2",))
    seen = variables(planned)
    assert (seen["A"], seen["B"], seen["RANK"]) == ("2", "1", "0")


def test_threads_are_this_workers_share_of_the_cpus(make_facts):
    cpus = CpuInventory(allowed=tuple(range(8)), online=8, quota=4.0)
    planned = plan(make_facts, facts={"cpus": cpus})
    assert variables(planned)["OMP_NUM_THREADS"] == "2"


def test_bound_workers_have_as_many_threads_as_cpus_near_their_gpu(make_facts):
    cpus = CpuInventory(allowed=tuple(range(8)), online=8, numa=((0, 1, 2, 3), (4, 5, 6, 7)))
    planned = plan(make_facts, facts={"cpus": cpus, "gpus": TWO}, num_procs=None, bind="numa")
    assert [worker.cpus for worker in planned.workers] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert variables(planned)["OMP_NUM_THREADS"] == "4"


def test_unbound_workers_keep_the_cpus(make_facts):
    assert [worker.cpus for worker in plan(make_facts).workers] == [None, None]


# --- binding


def test_the_port_is_open_until_it_is_bound(make_facts):
    planned = plan(make_facts)
    assert (planned.master_port, planned.wanted_port, "MASTER_PORT" in planned.env) == (None, 0, False)
    assert bind(planned, attempt=0, master_port=4711).env["MASTER_PORT"] == "4711"


def test_a_port_that_is_asked_for_is_known_from_the_start(make_facts):
    planned = plan(make_facts, master_port=29500, master_addr="10.0.0.1")
    assert (planned.master_port, planned.wanted_port) == (29500, 29500)
    assert (planned.env["MASTER_PORT"], planned.env["MASTER_ADDR"]) == ("29500", "10.0.0.1")


def test_every_attempt_has_its_own_number_port_and_error_files(make_facts):
    planned = plan(make_facts)
    second = bind(bind(planned, attempt=0, master_port=1), attempt=1, master_port=2)
    assert second == bind(planned, attempt=1, master_port=2), "nothing of an earlier attempt stays"
    assert second.workers[1].env["TORCHELASTIC_ERROR_FILE"] == TRAIN.error_files("/r/job-1", 1)(1)
    for layout in (TRAIN, TORCHRUN):
        for folder in ("/r", "/r{0}%s"):
            assert layout.error_files(folder, 3)(5).startswith(layout.attempt_dir(folder, 3) + "/")
    moved = replace(planned, run_dir="/elsewhere")
    assert bind(moved, attempt=0, master_port=1).workers[0].env["TORCHELASTIC_ERROR_FILE"].startswith("/elsewhere/")


def test_each_attempt_has_the_backends_files_in_its_own_folder(make_facts):
    on_gpus = Topology(nodes=(Node(host="a", slots=2),), device="cuda")
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    planned = plan(make_facts, topology=on_gpus)
    for attempt in (0, 1):
        env = bind(planned, attempt=attempt, master_port=1).env
        assert {env[name] for name in names} == {f"/r/job-1/attempt-{attempt}/nccl_trace_rank_"}


@pytest.mark.parametrize("options", [{"facts": {"environ": {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}}},
                                     {"env": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/mine",)}])  # fmt: skip
def test_a_file_that_has_an_old_name_and_a_new_one_is_left_alone_if_either_is_set(make_facts, options):
    planned = plan(make_facts, topology=Topology(nodes=(Node(host="a", slots=1),), device="cuda"), **options)
    bound = bind(planned, attempt=0, master_port=1)
    assert "TORCH_FR_DUMP_TEMP_FILE" not in bound.env
    assert {**bound.base_env, **bound.given_env}["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/mine"
    assert "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in bound.env


# --- the command


def test_a_script_runs_under_our_interpreter(make_facts):
    assert plan(make_facts, script_args=("--lr", "1 2", "")).argv == ("/usr/bin/python3", "train.py", "--lr", "1 2", "")


def test_a_module_is_not_looked_for(make_facts):
    planned = plan(make_facts, script="pkg.train", module=True, script_args=("x",))
    assert planned.argv == ("/usr/bin/python3", "-m", "pkg.train", "x")
    assert not planned.signal_group


def test_another_interpreter(make_facts):
    facts = {"programs": {"python3.10": "/opt/bin/python3.10"}}
    assert plan(make_facts, facts=facts, python="python3.10").argv == ("python3.10", "train.py")
    error = refused(make_facts, facts={"programs": {"nopy": None}}, python="nopy")
    assert error.message == "--python nopy: no such executable"


def test_without_python_the_program_itself_runs_and_its_group_is_signalled(make_facts):
    planned = plan(
        make_facts, facts={"programs": {"prog": "/bin/prog"}}, script="prog", no_python=True, script_args=("-x",)
    )
    assert planned.argv == ("prog", "-x")
    assert planned.signal_group


def test_a_program_with_a_path_is_found_whereever_it_was_typed(make_facts):
    facts = {"programs": {"./prog": "/w/./prog"}}
    assert plan(make_facts, facts=facts, script="./prog", no_python=True).argv == ("/w/./prog",)


@pytest.mark.parametrize(
    ("name", "kind", "message", "hint"),
    [
        ("prog", "missing", "prog: no such command on PATH", None),
        ("./prog", "missing", "./prog: there is no such file", None),
        ("./prog", "directory", "./prog: is a directory, a file is needed", None),
        ("./prog", "file", "./prog: is not executable", "chmod +x ./prog"),
    ],
)
def test_programs_that_cannot_run(make_facts, name, kind, message, hint):
    facts = {"programs": {name: None}, "paths": {"/w/./prog": kind}}
    error = refused(make_facts, facts=facts, script=name, no_python=True)
    assert (error.message, error.hint) == (message, hint)


def test_setup_runs_in_a_login_shell_before_the_unchanged_command(make_facts):
    planned = plan(make_facts, setup="module load cuda; export X='1 2'", script_args=("a b", "$HOME"))
    assert planned.argv[:3] == ("bash", "-l", "-c")
    assert planned.argv[-5:] == ("module load cuda; export X='1 2'", "/usr/bin/python3", "train.py", "a b", "$HOME")


def test_no_script_is_a_usage_error(make_facts):
    with pytest.raises(UsageError, match="SCRIPT is missing") as caught:
        plan(make_facts, script=None)
    assert "distlaunch train" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "gone.py: there is no such file"),
        ("unreadable", "gone.py: not readable by this user"),
        ("directory", "gone.py: is a directory, a file is needed"),
    ],
)
def test_a_script_that_cannot_run(make_facts, kind, message):
    error = refused(make_facts, facts={"paths": {"/w/gone.py": kind}}, script="gone.py")
    assert error.message == message
    assert (error.hint == "looked in /w") == (kind == "missing")


def test_names_with_control_characters_do_not_reach_the_screen_as_they_are(make_facts):
    assert "\x1b" not in refused(make_facts, script="a\x1b[31m\nb.py").message


def test_a_directory_with_a_main_module_runs(make_facts):
    facts = {"paths": {"/w/app": "directory", "/w/app/__main__.py": "file"}}
    assert plan(make_facts, facts=facts, script="app").argv == ("/usr/bin/python3", "app")


# --- the working directory


def test_the_working_directory_is_where_the_command_was_typed(make_facts):
    assert plan(make_facts).workdir == "/w"


def test_a_script_is_looked_for_in_the_working_directory_first(make_facts):
    facts = {"paths": {"/w/sub": "directory", "/w/sub/train.py": "file"}}
    planned = plan(make_facts, facts=facts, workdir="sub")
    assert (planned.workdir, planned.argv) == ("/w/sub", ("/usr/bin/python3", "train.py"))


def test_a_script_that_is_only_where_the_command_was_typed_is_named_in_full(make_facts):
    planned = plan(make_facts, facts={"paths": {"/data": "directory"}}, workdir="/data")
    assert (planned.workdir, planned.argv) == ("/data", ("/usr/bin/python3", "/w/train.py"))


def test_a_missing_script_says_where_it_was_looked_for(make_facts):
    error = refused(make_facts, facts={"paths": {"/data": "directory"}}, workdir="/data", script="gone.py")
    assert error.hint == "looked in /data and /w"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "--workdir sub: there is no such directory"),
        ("file", "--workdir sub: is a file, a directory is needed"),
        ("unreadable", "--workdir sub: not readable by this user"),
    ],
)
def test_a_working_directory_that_is_none(make_facts, kind, message):
    assert refused(make_facts, facts={"paths": {"/w/sub": kind}}, workdir="sub").message == message


# --- notes, and what is shown


def test_notes_of_the_topology_are_passed_on(make_facts):
    assert "one CPU worker" in plan(make_facts, num_procs=None).notes[0]


def test_a_pinned_launcher_is_said(make_facts):
    [note] = plan(make_facts, facts={"cpus": CpuInventory(allowed=(3,), online=64)}).notes
    assert "pinned to 1 of 64 CPUs" in note


@pytest.mark.parametrize(
    ("environ", "options", "said"),
    [
        ({"VIRTUAL_ENV": "/venv"}, {}, True),
        ({"CONDA_PREFIX": "/conda"}, {}, True),
        ({"VIRTUAL_ENV": "/usr"}, {}, False),
        ({"VIRTUAL_ENV": "/us"}, {}, True),
        ({"VIRTUAL_ENV": ""}, {}, False),
        ({"VIRTUAL_ENV": "/venv"}, {"python": "py"}, False),
        ({"VIRTUAL_ENV": "/venv"}, {"script": "py", "no_python": True}, False),
        ({}, {}, False),
    ],
)
def test_an_active_environment_that_workers_do_not_run_in_is_said(make_facts, environ, options, said):
    planned = plan(make_facts, facts={"environ": environ, "programs": {"py": "/bin/py"}}, **options)
    notes = [note for note in planned.notes if "not the active environment's" in note]
    assert bool(notes) == said
    if said:
        assert f"--python {next(iter(environ.values()))}/bin/python" in notes[0]


# --- properties


@given(
    procs=st.integers(1, 9),
    bound=st.sampled_from(["none", "cores", "numa"]),
    environ=st.dictionaries(st.sampled_from(["A", "RANK", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"]), st.text(max_size=3)),
    port=st.none() | st.integers(1, 65535),
)
@settings(deadline=None)
def test_the_same_facts_give_the_same_plan(make_facts, procs, bound, environ, port):
    def planned(names: list[str]) -> LaunchPlan:
        facts = {"environ": {name: environ[name] for name in names}}
        return plan(make_facts, facts=facts, num_procs=procs, bind=bound, master_port=port)

    first = planned(list(environ))
    assert first == planned(list(reversed(environ)))
    assert [int(worker.env["RANK"]) for worker in first.workers] == list(range(procs))
    assert len({worker.env["TORCHELASTIC_ERROR_FILE"] for worker in first.workers}) == procs


# --- words of the backend


class Worded(Backend):
    name = "worded"
    about = "gives each worker a word"

    def worker_words(self, local_rank: int) -> tuple[str, ...]:
        return (f"--local_rank={local_rank}",)


class AllWorded(Backend):
    name = "all-worded"
    about = "gives all workers a word"

    def script_words(self) -> tuple[str, ...]:
        return ("--config=c",)


def worded(make_facts, topology: Topology, backend: type[Backend] = Worded, **more) -> LaunchPlan:
    options = TrainOptions(script="train.py", script_args=("sub", "--lr=1"), num_procs=3, **more)
    return build_plan(options, make_facts(), topology, backend({}, {}), job_id="job-1", run_dir="/r/job-1")


def test_a_backends_words_for_all_workers_are_in_their_command_and_they_can_be_forked(make_facts):
    topology = Topology(nodes=(Node(host="a", slots=2),), device="cpu")
    planned = worded(make_facts, topology, AllWorded, preload="json")
    assert planned.argv == (make_facts().python, "train.py", "--config=c", "sub", "--lr=1")
    assert [worker.argv for worker in planned.workers] == [None, None]
    with pytest.raises(ConfigError, match="--preload and --local_rank for each worker exclude each other"):
        worded(make_facts, topology, preload="json")


def test_a_backends_words_stand_before_the_scripts_own_and_after_each_nodes_own_interpreter(make_facts):
    elsewhere = Node(host="b", slots=1, argv=("/opt/python", "train.py", "sub", "--lr=1"))
    topology = Topology(nodes=(Node(host="a", slots=2), elsewhere), device="cpu")
    python = make_facts().python
    assert [worker.argv for worker in worded(make_facts, topology).workers] == [
        (python, "train.py", "--local_rank=0", "sub", "--lr=1"),
        (python, "train.py", "--local_rank=1", "sub", "--lr=1"),
        ("/opt/python", "train.py", "--local_rank=0", "sub", "--lr=1"),
    ]


def test_a_backends_words_say_the_same_as_local_rank_where_each_worker_sees_its_own_gpu_alone(make_facts):
    masks = (("0",), ("1",))
    node = Node(host="a", slots=2, isolated=True, mask_variable="CUDA_VISIBLE_DEVICES", masks=masks, devices=("0", "1"))
    planned = worded(make_facts, Topology(nodes=(node,), device="cuda"))
    assert [worker.argv[2] for worker in planned.workers] == ["--local_rank=0", "--local_rank=0"]
