from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.planning.build_plan import bind
from distlaunch.planning.remote_environment import split_environment

STAY = (
    *(
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "PWD",
        "OLDPWD",
        "MAIL",
        "HOSTNAME",
        "DISPLAY",
        "XAUTHORITY",
        "TMPDIR",
    ),
    *(
        "SSH_AUTH_SOCK",
        "SSH_CONNECTION",
        "SSH_TTY",
        "XDG_RUNTIME_DIR",
        "DBUS_SESSION_BUS_ADDRESS",
        "TMUX",
        "TMUX_PANE",
    ),
    *(
        "TERM_PROGRAM",
        "TERM_PROGRAM_VERSION",
        "VSCODE_IPC_HOOK_CLI",
        "BASH_FUNC_module%%",
        "BASH_FUNC_ml()",
        "SHLVL",
    ),
    *(
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "GPU_DEVICE_ORDINAL",
    ),
    *(
        "NVIDIA_VISIBLE_DEVICES",
        "SLURM_PROCID",
        "SLURM_STEP_ID",
        "SLURM_STEP_NODELIST",
        "SLURMD_NODENAME",
        "PMI_RANK",
    ),
    *("PMIX_RANK", "NOTIFY_SOCKET", "LISTEN_FDS", "JOURNAL_STREAM", "KRB5CCNAME"),
)
GO = (
    *(
        "LANG",
        "LC_ALL",
        "TERM",
        "TZ",
        "EDITOR",
        "http_proxy",
        "HF_HOME",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "PYTHONPATH",
    ),
    *(
        "NCCL_DEBUG",
        "NCCL_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "CUDA_HOME",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "DATA",
    ),
    *(
        "PYTHONUNBUFFERED",
        "PYTORCH_CUDA_ALLOC_CONF",
        "MY_SSH_KEY",
        "HOMEPAGE",
        "XDGX",
        "TMPDIRS",
        "PATHS",
    ),
)
OURS = (
    *(
        "PATH",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "CONDA_DEFAULT_ENV",
        "CONDA_PREFIX_1",
    ),
    *(
        "PYTHONHOME",
        "PYTHONUSERBASE",
        "LOADEDMODULES",
        "_LMFILES_",
        "LMOD_CMD",
        "_ModuleTable001_",
        "PYENV_ROOT",
    ),
)


@pytest.mark.parametrize("name", STAY)
def test_variables_of_a_host_stay(name):
    assert split_environment({name: "x"}) == ({}, {})


@pytest.mark.parametrize("name", GO)
def test_variables_of_the_user_are_removed(name):
    assert split_environment({name: "x"}) == ({name: "x"}, {})


@pytest.mark.parametrize("name", OURS)
def test_software_paths_go_where_our_interpreter_is(name):
    assert split_environment({name: "x"}) == ({}, {name: "x"})


@given(st.dictionaries(st.sampled_from([*STAY, *GO, *OURS]) | st.text(min_size=1), st.text()))
def test_values_are_as_they_were_and_nothing_is_in_both(environ):
    everywhere, with_ours = split_environment(environ)
    assert not everywhere.keys() & with_ours.keys()
    assert {**everywhere, **with_ours}.items() <= environ.items()


def variables(plan, node_rank: int) -> dict[str, str]:
    """Return the variables that are sent to a node's workers."""
    worker = next(each for each in plan.workers if each.node_rank == node_rank)
    return {**plan.shared_env, **plan.nodes[node_rank].env, **worker.env}


def composed(make_planner, make_surveys, **options):
    environ = {
        "PATH": "/env/bin:/bin",
        "VIRTUAL_ENV": "/env",
        "HOME": "/h",
        "A": "1",
        "RANK": "7",
        "BIG": "x" * 300_000,
    }
    made = make_planner(hosts="a,b", environ=environ, **options)
    surveys = make_surveys(made)
    surveys[1] = make_surveys(made, python="/opt/python3")[1]
    return made.plan_attempt(surveys)[1]


def test_each_node_gets_what_fits_it(make_planner, make_surveys):
    plan = composed(make_planner, make_surveys)
    first, second = variables(plan, 0), variables(plan, 1)
    assert (first["PATH"], first["VIRTUAL_ENV"]) == ("/env/bin:/bin", "/env")
    assert not {"PATH", "VIRTUAL_ENV"} & second.keys()
    for each in (first, second):
        assert (each["A"], len(each["BIG"]), "HOME" in each) == ("1", 300_000, False)
    assert (first["RANK"], second["RANK"]) == ("0", "1")


def test_given_variables_come_before_all(make_planner, make_surveys):
    plan = composed(make_planner, make_surveys, env=("PATH=/mine", "HOME", "DISPLAY=:1"))
    assert [variables(plan, rank)["PATH"] for rank in (0, 1)] == ["/mine", "/mine"]
    assert [variables(plan, rank)["HOME"] for rank in (0, 1)] == ["/h", "/h"]
    assert variables(plan, 1)["DISPLAY"] == ":1"


def test_without_forwarding_only_what_is_given_is_sent(make_planner, make_surveys):
    plan = composed(make_planner, make_surveys, forward_env=False, env=("B=2", "A"))
    sent = variables(plan, 0)
    assert {"PATH", "VIRTUAL_ENV", "BIG", "HOME"}.isdisjoint(sent)
    assert (sent["A"], sent["B"], sent["WORLD_SIZE"]) == ("1", "2", "2")
    assert plan.base_env == {}


def test_a_users_interpreter_brings_the_environment_where_folders_are_shared(
    make_planner, make_surveys
):
    made = make_planner(hosts="a,b", environ={"PATH": "/p"}, python="/env/bin/python")
    surveys = make_surveys(made, python="/env/bin/python")
    surveys[1] = make_surveys(made, python="/env/bin/python", shares_run_dir=True)[1]
    _, plan = made.plan_attempt(surveys)
    assert ["PATH" in variables(plan, rank) for rank in (0, 1)] == [False, True]


def test_programs_have_our_path_where_our_interpreter_is(make_planner, make_surveys):
    made = make_planner(hosts="a,b", environ={"PATH": "/p"}, script="run", no_python=True)
    surveys = make_surveys(made)
    surveys[1] = make_surveys(made, python=None)[1]
    _, plan = made.plan_attempt(surveys)
    assert ["PATH" in variables(plan, rank) for rank in (0, 1)] == [True, False]
    assert (plan.argv, [node.argv for node in plan.nodes]) == (("run",), [None, None])


def test_nodes_that_are_alike_share_what_travels(make_planner, make_surveys):
    made = make_planner(hosts="n[1-50]", environ={"PATH": "/p", "CONDA_PREFIX": "/c"})
    _, plan = made.plan_attempt(make_surveys(made))
    assert len({id(node.env) for node in plan.nodes}) == 1


def test_no_travelling_value_shows_in_records(make_planner, make_surveys):
    plan = composed(make_planner, make_surveys)
    shown = "".join(bind(plan, attempt=0, master_port=1).json_chunks()) + repr(plan)
    assert "/env/bin" not in shown
