from __future__ import annotations

import pytest

from distlaunch.cli.compat.deepspeed.command import deepspeed
from distlaunch.cli.compat.deepspeed.options import COMMAND_OPTIONS, OPTIONS
from distlaunch.cli.compat.deepspeed.translate import DeepspeedTranslation, translate
from distlaunch.cli.parser import scan
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.option_names import Opt, use_names
from distlaunch.planning.train_options import advice_on_cpu_workers, use_cpus
from tests.facts import mentions

NO_FILE = "/nowhere/hostfile"


def meaning(*words: str, default_hostfile: str = NO_FILE, **environ: str) -> DeepspeedTranslation:
    given, rest = scan([*words, "s.py", "a"], OPTIONS, abbreviated=COMMAND_OPTIONS)
    return translate(given, rest, environ, default_hostfile=default_hostfile)


def options(*words: str, **environ: str):
    return meaning(*words, **environ).options


def refused(*words: str, **environ: str) -> ConfigError:
    with pytest.raises(UsageError) as caught:
        meaning(*words, **environ)
    return caught.value


def test_a_plain_command_is_this_machine_and_gives_local_rank():
    found = options()
    assert (found.backend, found.script, found.script_args, found.opt) == (
        "deepspeed",
        "s.py",
        ("a",),
        ("local-rank=on",),
    )
    assert (found.source, found.hosts, found.hostfile, found.quiet) == ("flags", None, None, False)
    assert (found.grace, found.failure_grace) == (30.0, 30.0)


def test_its_host_file_is_read_where_it_is_there_and_no_other_is_named(tmp_path):
    there = tmp_path / "hostfile"
    there.write_text("a slots=2\n")
    assert meaning(default_hostfile=str(there)).options.hostfile == str(there)
    assert meaning("-H", "mine", default_hostfile=str(there)).options.hostfile == "mine"
    assert meaning("--hosts", "a:1", default_hostfile=str(there)).options.hostfile is None
    assert meaning("--launcher", "slurm", default_hostfile=str(there)).options.hostfile is None


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["-i", "a:0,2"], "include", "a:0,2"),
        (["--exclude=b"], "exclude", "b"),
        (["--num_nodes", "2"], "num_nodes", 2),
        (["--master_addr", "h", "-H", "f"], "master_addr", "h"),
        (["--master_addr", "h"], "master_addr", None),  # there, too, one machine is its own master
        (["--master_port=29501"], "master_port", 29501),
        (["--module"], "module", True),
        (["--no_python"], "no_python", True),
        (["--no_local_rank"], "opt", ()),
        (["-o", "local-rank=off"], "opt", ("local-rank=off",)),
        (["-o", "LOCAL_RANK=off"], "opt", ("LOCAL_RANK=off",)),
        (["-o", "zero=3"], "opt", ("zero=3", "local-rank=on")),
        (["--ssh_port", "2222"], "ssh_port", 2222),
        (["--bind_cores_to_rank"], "bind", "cores"),
        (["--venv_script", "a b"], "setup", ". 'a b'"),
        (["--enable_each_rank_log", "logs"], "log_dir", "logs"),
        (["--enable_each_rank_log", "logs"], "output", "none"),
        (["--enable_each_rank_log", "None"], "log_dir", None),
        (["--log_level", "warning"], "quiet", True),
        (["--log_level", "info"], "quiet", False),
        (["-q"], "quiet", True),
        (["--launcher", "SLURM"], "source", "slurm"),
        (["--launcher", "slurm", "--launcher_args=--comment=x"], "srun_args", "--comment=x"),
        (["--max-restarts", "3"], "max_restarts", 3),
        (["--num_nodes=-1"], "num_nodes", None),
        (["--num_g", "2"], "hosts", "localhost:2"),  # as argparse takes it
        (["--num_node=2"], "num_nodes", 2),
        (["-i=a:0"], "include", "a:0"),
    ],
    ids=str,
)
def test_a_word_becomes_an_option_of_train(words, field, value):
    assert getattr(options(*words), field) == value


@pytest.mark.parametrize("flag", ["--num_gpus", "--num_accelerators", "--num-gpus"])
def test_a_number_of_gpus_is_each_nodes(flag):
    assert options(flag, "2").hosts == "localhost:2"
    assert options(flag, "2", "-H", "f").gpus_per_node == 2
    assert options(flag, "2", DS_ACCELERATOR="cpu").procs_per_node == 2
    assert options(flag, "2", "-H", "f", DS_ACCELERATOR="cpu").procs_per_node == 2
    assert options(flag, "-1").hosts is None


def test_both_names_of_the_number_of_gpus_may_have_the_same_value():
    assert options("--num_accelerators", "2", "--num_gpus", "2").hosts == "localhost:2"
    assert mentions(
        refused("--num_accelerators", "2", "--num_gpus", "3").message,
        "--num_gpus 3",
        "--num_accelerators 2",
        "contradict",
    )


@pytest.mark.parametrize("flag", ["--include", "--exclude", "--master_addr", "--launcher_args"])
def test_empty_texts_that_are_its_defaults_have_no_effect(flag):
    assert options(flag, "", "--num_gpus", "2") == options("--num_gpus", "2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_gpus", "x", "s.py"], "--num_gpus takes a whole number >= 1, not 'x'"),
        (["--num-nodes", "x", "s.py"], "--num_nodes takes a whole number >= 1 or MIN:MAX, not 'x'"),
        (["--num_nodes"], "--num_nodes needs a value: --num_nodes N|MIN:MAX"),
        (["--gpus-per-node", "x", "s.py"], "--gpus-per-node takes a whole number >= 1, not 'x'"),
    ],
    ids=str,
)
def test_errors_name_options_as_deepspeed_writes_them(words, message):
    with pytest.raises(UsageError) as caught:
        deepspeed(words, {})
    assert caught.value.message == message
    with use_names(options("-H", "f").dialect.names):
        assert f"{Opt.NUM_NODES}, {Opt.NODE_RANK}" == "--num_nodes, --node_rank"


def test_ds_accelerator_decides_the_device_unless_gpus_are_asked_for():
    assert options(DS_ACCELERATOR="cpu").device == "cpu"
    assert options("--gpus", "1", DS_ACCELERATOR="cpu").device == "auto"


def test_workers_without_gpus_are_described_as_its_own_launcher_starts_them():
    with use_names(options("--num_gpus", "4").dialect.names):
        assert advice_on_cpu_workers(several=False) == "; --num_gpus N starts N of them"
        assert advice_on_cpu_workers(several=True) == "; --num_gpus N starts N of them on each node"
        assert mentions(use_cpus(several=False), "DS_ACCELERATOR=cpu", "--num_gpus N")
        assert mentions(use_cpus(several=True), "DS_ACCELERATOR=cpu", "on each node")


def test_a_script_that_does_not_take_local_rank_is_given_a_hint_how_deepspeed_leaves_it_out():
    with use_names(options().dialect.names):
        assert Opt.OPT("local-rank=off") == "--no_local_rank"


# --- nodes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--master_addr", "h"], (1, "h:29500", "h", None)),
        (["--master_addr", "h", "--master_port", "5"], (1, "h:5", "h", None)),
        (["--master_addr", "fd00::1"], (1, "[fd00::1]:29500", "fd00::1", None)),
        ([], (1, None, None, None)),
    ],
    ids=str,
)
def test_without_ssh_a_launcher_on_each_node_joins_at_the_masters_address(words, expected):
    found = options("-H", "f", "--no_ssh", "--node_rank", "1", *words)
    assert (found.node_rank, found.rendezvous, found.master_addr, found.master_port) == expected


def test_a_node_rank_is_of_use_without_ssh_alone():
    assert meaning("-H", "f", "--node_rank", "1").options.node_rank is None
    assert mentions(meaning("--node_rank", "0").notices[0], "no effect", "--no_ssh")
    assert mentions(refused("-H", "f", "--no_ssh").message, "--no_ssh")
    assert mentions(refused("--no_ssh", "--node_rank", "1").message, "--no_ssh", "--node_rank 1")
    assert options("--no_ssh", "--node_rank", "0").node_rank is None


@pytest.mark.parametrize(
    "words",
    [
        ["--hosts", "localhost:2,b:2"],
        ["--hosts", "localhost:2,b:2", "--source", "flags"],
        ["--discover", "./hosts"],
        ["--source", "kubernetes"],
        ["--launcher", "slurm"],
        ["--rendezvous", "h:4000"],
    ],
    ids=lambda words: words[0][2:] + str(len(words)),
)
def test_other_sources_of_nodes_do_not_move_the_master(words):
    assert options(*words, "--master_addr", "10.0.0.1").master_addr == "10.0.0.1"
    assert options(*words, "--no_ssh", "--node_rank", "1").node_rank == 1


def test_with_another_rendezvous_a_node_rank_is_of_use_too():
    words = ["--rendezvous", "h:4000", "--num_nodes", "2"]
    found = meaning(*words, "--node_rank", "1")
    assert (found.options.node_rank, found.options.rendezvous, found.notices) == (1, "h:4000", ())
    assert (
        options(
            "--num_nodes", "2", DISTLAUNCH_NODE_RANK="1", DISTLAUNCH_RENDEZVOUS="h:4000"
        ).node_rank
        == 1
    )
    assert options(*words, "--no_ssh").node_rank is None  # it is dealt at the start
    assert (
        options(*words, "--num_gpus", "2").gpus_per_node,
        options(*words, "--num_gpus", "2").hosts,
    ) == (2, None)


def test_the_nodes_are_those_of_the_slurm_job_or_anothers():
    shown = "--launcher slurm: the nodes are those of the Slurm job, not "
    assert (
        refused("--launcher", "slurm", "--source", "kubernetes").message
        == f"{shown}--source kubernetes's"
    )
    assert options("--launcher", "slurm", DISTLAUNCH_SOURCE="kubernetes").source == "slurm"
    assert refused("--launcher", "slurm", "--source", "auto").message == f"{shown}--source auto's"
    assert (
        options("--launcher", "slurm", DISTLAUNCH_HOSTS="a:1").hosts is None
    )  # the command line wins
    with use_names(options("--launcher", "slurm").dialect.names):
        assert Opt.SOURCE("slurm") == "--launcher slurm"


def test_messages_about_the_rendezvous_use_the_options_of_deepspeed():
    typed = ["-H", "f", "--no_ssh", "--node_rank", "0", "--master_addr", "h"]
    with use_names(options(*typed).dialect.names):
        assert Opt.RENDEZVOUS("HOST:PORT") == "--master_port PORT"
        assert f"{Opt.RENDEZVOUS}, {Opt.RENDEZVOUS_PORT}" == "--master_addr, --master_port"
    with use_names(options(*typed, "--rendezvous", "h:1").dialect.names):
        assert Opt.RENDEZVOUS("HOST:PORT") == "--rendezvous HOST:PORT"


def test_launchers_that_are_not_ours_are_named_and_ssh_stands_for_them():
    (by_srun,) = meaning("--source", "slurm", "--launcher", "OpenMPI").notices
    assert mentions(by_srun, "--launcher openmpi", "srun")
    (by_ssh,) = meaning("-H", "f", "--launcher", "OpenMPI").notices
    assert mentions(by_ssh, "--launcher openmpi", "SSH")
    assert meaning("-H", "f", "--launcher", "pdsh", "--force_multi", "--no_ssh_check").notices == ()
    assert mentions(refused("--launcher", "ssh").hint, "pdsh", "openmpi")
    assert "not --hostfile's" in refused("-H", "f", "--launcher", "slurm").message
    error = refused("-H", "f", "--launcher=openmpi", "--launcher_args=-x A")
    assert mentions(error.message, "--launcher_args", "SSH", "openmpi")


@pytest.mark.parametrize("text", ["-x -y", "--x -y"])
def test_arguments_of_a_launcher_are_one_word_also_with_dashes_and_change_nothing_on_one_machine(
    text,
):
    (notice,) = meaning("--launcher_args", text).notices
    assert mentions(notice, "--launcher_args", "no effect")
    assert options("--launcher", "slurm", "--launcher_args", text).srun_args == text


def test_include_and_exclude_exclude_each_other():
    assert mentions(
        refused("-H", "f", "-i", "a", "-e", "b").message, "--include", "--exclude", "exclude"
    )


def test_elastic_training_is_a_range_of_nodes_and_restarts():
    words = ["-H", "f", "--elastic_training", "--max_elastic_nodes", "4"]
    assert (options(*words).num_nodes, options(*words).max_restarts) == ((1, 4), 100)
    assert options(*words, "--min_elastic_nodes", "4").num_nodes == 4
    assert options(*words, "--max_restarts", "2").max_restarts == 2
    error = refused(*words, "--min_elastic_nodes", "5")
    assert mentions(error.message, "--min_elastic_nodes 5", "--max_elastic_nodes 4")
    assert "not said" in refused("--elastic_training").message
    assert mentions(refused(*words, "--num_nodes", "2").message, "--num_nodes", "exclude")
    assert mentions(refused("--max_elastic_nodes", "2").message, "--elastic_training")


@pytest.mark.parametrize(
    ("words", "shown", "hint"),
    [
        (["--autotuning", "tune"], "--autotuning", "deepspeed --autotuning tune"),
        (
            ["--bind_core_list", "0-3"],
            "--bind_core_list '0-3'",
            "taskset -c 0-3 distlaunch deepspeed",
        ),
        (
            ["--num_gpus", "2", "-i", "a:0"],
            "--num_gpus and --include exclude each other",
            "--include says",
        ),
        (
            ["--num_nodes", "2", "-e", "a"],
            "--num_nodes and --exclude exclude each other",
            "--exclude says",
        ),
        (
            ["--num_gpus", "2", "--num-procs", "2"],
            "--num_gpus and --num-procs exclude each other",
            "per GPU",
        ),
        (
            ["--num_gpus", "2", "--gpus-per-node", "2"],
            "--num_gpus and --gpus-per-node exclude each other",
            "one of them",
        ),
        (
            ["--venv_script", "a", "--setup", "b"],
            "--venv_script and --setup exclude each other",
            "does both",
        ),
        (["--num_gps", "2"], "unknown option '--num-gps'", "did you mean --num_gpus?"),
        (["--module", "--no_python"], "-m and --no-python exclude each other", "needs Python"),
    ],
    ids=str,
)
def test_an_unsupported_option_is_refused_with_its_replacement(words, shown, hint):
    error = refused(*words)
    assert shown in error.message
    assert hint in error.hint


def test_errors_about_sizes_speak_of_the_word_that_was_typed():
    with use_names(options("--num_gpus", "2", "-H", "f").dialect.names):
        assert Opt.GPUS_PER_NODE(2) == "--num_gpus 2"
    with use_names(options("-H", "f").dialect.names):
        assert Opt.GPUS_PER_NODE(2) == "--gpus-per-node 2"
