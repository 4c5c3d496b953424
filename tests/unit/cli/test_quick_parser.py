from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.cli.app import run_app
from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.cli.parser import HelpRequested, parse_plan, parse_train, unknown_variables
from distlaunch.cli.suggestions import replace_torchrun_option
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.record import replace
from distlaunch.planning.train_options import TrainOptions
from tests.facts import mentions


def parse(*words: str, **environ: str) -> TrainOptions:
    return replace(parse_train(words, environ), given={})


@pytest.mark.parametrize(
    ("words", "environ", "given_by"),
    [
        (["--num-procs", "8"], {"NUM_PROCS": "08"}, {"num_procs": "--num-procs"}),
        ([], {"NUM_PROCS": "08", "GPUS": ""}, {"num_procs": "DISTLAUNCH_NUM_PROCS"}),
        (["--gpus-per-node", "2"], {"NUM_PROCS": "8"}, {"gpus_per_node": "--gpus-per-node"}),
        ([], {"NODE_RANK": "0"}, {"node_rank": "DISTLAUNCH_NODE_RANK"}),
        ([], {"TRAIN_JOB_ID": "j", "JOB_ID": "i"}, {"job_id": "DISTLAUNCH_TRAIN_JOB_ID"}),
        (["--no-spread"], {"SPREAD": "yes"}, {"spread": "--spread"}),
    ],
)
def test_the_origin_of_an_option_is_kept(words, environ, given_by):
    options = parse_train(
        [*words, "s"], {f"DISTLAUNCH_{name}": value for name, value in environ.items()}
    )
    assert options.given == given_by
    assert options.who_set("script", "grace", "spread") == "SCRIPT"
    assert all(options.named(field) == by for field, by in given_by.items())


def refused(*words: str, **environ: str) -> tuple[str, str | None]:
    with pytest.raises(ConfigError) as caught:
        parse_train(words, environ)
    return caught.value.message, caught.value.hint


def test_mpiruns_spelling_of_an_option_is_no_call_for_help():
    message, hint = refused("-hostfile", "f", "s")
    assert message == "unknown option '-hostfile'"
    assert mentions(hint, "--hostfile")


def run_app_train(words: list[str], environ: dict[str, str]) -> int:
    return run_app(["train", *words], environ)


def test_a_script_alone_gives_the_defaults():
    assert parse("train.py") == TrainOptions(script="train.py")


def test_words_after_the_script_are_the_scripts():
    options = parse("--quiet", "train.py", "--num-gpus", "4", "--", "-h", "", "--help")
    assert options == TrainOptions(
        script="train.py", script_args=("--num-gpus", "4", "--", "-h", "", "--help"), quiet=True
    )


@given(st.lists(st.text(st.characters()), max_size=6))
def test_any_words_after_the_script_or_the_double_dash_arrive_unchanged(words):
    assert parse("train.py", *words).script_args == tuple(words)
    assert parse("--", "train.py", *words).script_args == tuple(words)
    assert parse("--script", "train.py", "--", *words).script_args == tuple(words)


def test_bytes_that_are_no_text_arrive_unchanged():
    assert parse("tr\udcffain.py", "\udc80").script_args == ("\udc80",)


def test_with_script_given_the_first_other_word_is_an_argument():
    assert parse("--script", "a.py", "--num-procs", "2", "b.py", "--quiet") == TrainOptions(
        script="a.py", num_procs=2, script_args=("b.py", "--quiet")
    )


def test_a_double_dash_before_the_script_is_ours_and_the_next_one_is_not():
    assert parse("--", "-odd.py", "--", "x") == TrainOptions(
        script="-odd.py", script_args=("--", "x")
    )


def test_long_options_take_underscores_and_values_either_way():
    expected = TrainOptions(script="s", num_procs=3, log_dir="a_b=c")
    assert parse("--num_procs=3", "--log_dir", "a_b=c", "s") == expected
    assert parse("--num-procs", "3", "--log-dir=a_b=c", "s") == expected


def test_short_options_take_attached_values_and_stand_together():
    expected = TrainOptions(script="pkg.mod", module=True, env=("A=1", "B"))
    assert parse("-m", "-x", "A=1", "-xB", "pkg.mod") == expected
    assert parse("-mxA=1", "--env", "B", "pkg.mod") == expected


def test_the_last_of_a_repeated_option_wins_and_env_collects():
    options = parse("--grace", "1", "--env-file", "a", "--grace", "2m", "--env-file", "b", "s")
    assert (options.grace, options.env_file) == (120.0, ("a", "b"))


def test_a_value_may_look_like_an_option_when_it_is_attached():
    assert parse("--setup=--quiet", "s").setup == "--quiet"


def test_the_environment_gives_defaults_and_the_command_line_wins():
    environ = {
        "DISTLAUNCH_GRACE": "3",
        "DISTLAUNCH_QUIET": "yes",
        "DISTLAUNCH_TRAIN_JOB_ID": "mine",
    }
    options = parse("--grace", "4", "s", **environ)
    assert (options.grace, options.quiet, options.job_id) == (4.0, True, "mine")


def test_variables_that_a_worker_has_are_not_read():
    worker = {"DISTLAUNCH_JOB_ID": "outer", "DISTLAUNCH_BACKEND": "ray", "DISTLAUNCH_ATTEMPT": "3"}
    assert parse("s", **worker) == TrainOptions(script="s")


def test_an_empty_variable_is_no_setting():
    assert parse("s", DISTLAUNCH_GRACE="", DISTLAUNCH_LOG_DIR="") == TrainOptions(script="s")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("ON", True), ("0", False), ("No", False), ("false", False)]
)
def test_switches_are_read_from_the_environment(text: str, value: bool):
    assert parse("s", DISTLAUNCH_QUIET=text).quiet is value


def test_the_command_line_undoes_a_switch_of_the_environment():
    assert parse("--no-quiet", "s", DISTLAUNCH_QUIET="1").quiet is False
    assert parse(
        "--no_isolate_gpus", "s", DISTLAUNCH_ISOLATE_GPUS="on", DISTLAUNCH_QUIET="1"
    ) == TrainOptions(script="s", quiet=True)


def test_the_last_of_a_switch_and_its_negation_wins():
    assert parse("--no-quiet", "--quiet", "s").quiet is True
    assert parse("--quiet", "--no-quiet", "s").quiet is False


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--num-workers", "--num-gpus N, or --num-procs N for CPU workers"),
        ("--exclusive", "that is an option of sbatch"),
    ],
)
def test_an_option_of_another_program_that_is_like_one_of_ours_is_not_taken_for_it(flag, meant):
    hint = refused(flag, "2", "s")[1]
    assert hint.startswith(meant)
    assert "--num-nodes" not in hint
    assert "--exclude" not in hint


def test_a_negation_takes_no_value_and_only_switches_with_a_variable_have_one():
    assert mentions(refused("--no-quiet=1", "s")[0], "--no-quiet", "'1'")
    assert refused("--no-dry-run", "s")[0] == "unknown option '--no-dry-run'"
    assert mentions(refused("--no-quite", "s")[1], "--no-quiet", "SCRIPT")


def test_a_switch_that_is_neither_is_refused_by_its_variable():
    message, _ = refused("s", DISTLAUNCH_ISOLATE_GPUS="maybe")
    assert mentions(message, "DISTLAUNCH_ISOLATE_GPUS", "1", "0", "'maybe'")


def test_repeatable_variables_are_split_with_a_shells_quotes():
    assert parse("s", DISTLAUNCH_ENV="A=1 'B=two words'").env == ("A=1", "B=two words")
    assert mentions(refused("s", DISTLAUNCH_ENV="A='")[0], "DISTLAUNCH_ENV", '"A=\'"')


def test_a_size_on_the_command_line_drops_the_sizes_of_the_environment():
    environ = {"DISTLAUNCH_NUM_GPUS": "8", "DISTLAUNCH_GPUS_PER_NODE": "4"}
    assert parse("--num-procs", "2", "s", **environ) == TrainOptions(script="s", num_procs=2)
    assert parse("s", **environ).num_gpus == 8


@pytest.mark.parametrize("asker", ["--help", "-h", "-mh"])
def test_help_before_the_script_is_handed_on(asker: str):
    with pytest.raises(HelpRequested):
        parse("--num-gpus", "2", asker, "train.py")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ((), "SCRIPT is missing", "it comes after our options: [OPTIONS] SCRIPT [ARGS]..."),
        (("--",), "SCRIPT is missing", "it comes after our options: [OPTIONS] SCRIPT [ARGS]..."),
        (("",), "SCRIPT is an empty word", None),
        (
            ("--num-gpu", "4", "s"),
            "unknown option '--num-gpu'",
            "did you mean --num-gpus? Options of the script go after SCRIPT.",
        ),
        (("--lr=0.1", "s"), "unknown option '--lr'", "Options of the script go after SCRIPT."),
        (
            ("--backend", "fsdp", "--sharding", "full", "s"),
            "unknown option '--sharding'",
            "--backend fsdp takes it as -o sharding=full|grad|hybrid. Options of the script go after SCRIPT.",
        ),
        (
            ("--backend=accelerate", "--config_file", "x.yaml", "s"),
            "unknown option '--config-file'",
            "--backend accelerate takes it as -o config=FILE. Options of the script go after SCRIPT.",
        ),
        (
            ("--zero", "3", "--backend", "deepspeed", "s"),
            "unknown option '--zero'",
            "--backend deepspeed takes it as -o zero=0|1|2|3. Options of the script go after SCRIPT.",
        ),
        (
            ("--zero=3", "s", "--backend", "nccl"),
            "unknown option '--zero'",
            "Options of the script go after SCRIPT.",
        ),
        (
            ("--backend", "nosuch", "--lr=1", "s"),
            "unknown option '--lr'",
            "Options of the script go after SCRIPT.",
        ),
        (("-q", "s"), "unknown option '-q'", "Options of the script go after SCRIPT."),
        (("-mq", "s"), "unknown option '-q'", "Options of the script go after SCRIPT."),
        (("--grace",), "--grace needs a value: --grace SECONDS", None),
        (("--grace", "--", "s"), "--grace needs a value: --grace SECONDS", None),
        (
            ("--log-dir", "--quiet", "s"),
            "--log-dir needs a value: --log-dir DIR",
            "if '--quiet' is that value, write --log-dir=--quiet",
        ),
        (("--quiet=1", "s"), "--quiet takes no value, and got '1'", None),
        (("--log-dir=", "s"), "--log-dir needs a value (DIR), and got an empty one", None),
        (
            ("-m", "--no-python", "s"),
            "-m and --no-python exclude each other",
            "a module needs Python to run it",
        ),
    ],
)
def test_a_wrong_command_line_is_answered_with_one_line_and_a_way_out(
    words, message: str, hint: str | None
):
    with pytest.raises(UsageError) as caught:
        parse_train(words, {})
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize("parser", [parse_train, parse_plan, run_app_train])
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--nproc_per_node=2",), "--gpus-per-node N, or --procs-per-node N for CPU workers"),
        (("--rdzv-id", "x"), "--job-id ID"),
        (("--standalone",), "not needed here: one machine"),
        (("-t", "3"), "not needed here: all output is shown and filed"),
        (("-r3",), "not needed here: all output is shown and filed"),
        (("--numa_binding", "node"), "--bind numa"),
        (("--quiet", "--virtual-local-rank"), "--isolate-gpus"),
    ],
)
def test_words_of_torchrun_are_answered_with_what_stands_for_them(parser, words, hint: str):
    with pytest.raises(UsageError) as caught:
        parser([*words, "s"], {})
    assert (caught.value.hint or "").startswith(hint)
    assert "SCRIPT" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    "flag",
    [
        "--standalone",
        "--tee",
        "-t",
        "-r",
        "--redirects",
        "--nproc-per-node",
        "--nnodes",
        "--rdzv-id",
        "--rdzv-backend",
        "--rdzv-conf",
        "--rdzv-endpoint",
        "--monitor-interval",
        "--start-method",
        "--role",
        "--log-line-prefix-template",
        "--local-ranks-filter",
        "--shutdown-timeout",
        "--numa-binding",
        "--virtual-local-rank",
        "--run-path",
        "--signals-to-handle",
        "--local-addr",
        "--logs-specs",
        "--event-log-handler",
        "--duplicate-stdout-filters",
        "--duplicate-stderr-filters",
    ],
)
def test_every_word_of_torchrun_has_a_counterpart_whose_options_exist(flag: str):
    hint = replace_torchrun_option(flag) or ""
    ours = {known for option in TRAIN_OPTIONS for known in option.all_flags}
    named = {word.strip(",:;()") for word in hint.split() if word.startswith("-")} - {flag}
    assert hint
    assert named <= ours
    assert flag not in ours


def test_after_script_as_an_option_arguments_of_the_script_need_a_double_dash():
    message, hint = refused("--script", "train.py", "--num-procs", "1", "--steps", "1")
    assert message == "unknown option '--steps'"
    assert mentions(hint, "--script", "train.py", "--steps")
    assert "--isolate-gpus" in (refused("--script", "t.py", "--virtual-local-rank")[1] or "")


def test_a_variable_with_our_prefix_that_nobody_reads_is_reported_with_the_nearest():
    environ = {
        "DISTLAUNCH_MAXRESTARTS": "3",
        "DISTLAUNCH_ZZZ": "1",
        "DISTLAUNCH_EMPTY": "",
        "DISTLAUNCH_GRACE": "3",
        "DISTLAUNCH_RUN_DIR": "/r",
        "DISTLAUNCH_TOKEN_FILE": "t",
        "DISTLAUNCH_TEST_VENV": "v",
        "OTHER": "x",
    }
    misspelt, unlike_any = unknown_variables(environ)
    assert mentions(misspelt, "'DISTLAUNCH_MAXRESTARTS'", "DISTLAUNCH_MAX_RESTARTS")
    assert re.findall("DISTLAUNCH_[A-Z_]+", unlike_any) == ["DISTLAUNCH_ZZZ"]


def test_a_variable_that_only_workers_get_is_reported_with_the_options_own():
    environ = {"DISTLAUNCH_BACKEND": "fsdp", "DISTLAUNCH_JOB_ID": "j", "DISTLAUNCH_RUN_DIR": "/r"}
    backend, job_id = unknown_variables(environ)
    assert mentions(backend, "'DISTLAUNCH_BACKEND'", "DISTLAUNCH_TRAIN_BACKEND")
    assert mentions(job_id, "'DISTLAUNCH_JOB_ID'", "DISTLAUNCH_TRAIN_JOB_ID")
    assert unknown_variables({**environ, "DISTLAUNCH_ATTEMPT": "0"}) == [], (
        "a launcher inside a worker"
    )


def test_options_are_not_abbreviated():
    assert refused("--master-p", "1", "s")[0] == "unknown option '--master-p'"


def test_gpus_and_processes_are_not_counted_together():
    assert mentions(
        refused("--num-gpus", "2", "--num-procs", "2", "s")[0],
        "--num-gpus",
        "--num-procs",
        "exclude",
    )
    assert mentions(
        refused("s", DISTLAUNCH_GPUS_PER_NODE="2", DISTLAUNCH_NUM_PROCS="2")[0],
        "DISTLAUNCH_GPUS_PER_NODE",
        "DISTLAUNCH_NUM_PROCS",
        "exclude",
    )


@pytest.mark.parametrize("word", ["--\x1b]0;x\x07", "-\udcff", "--" + "x" * 5000, "--a\nb"])
def test_messages_stay_one_printable_line(word: str):
    message, hint = refused(word, "s")
    assert message.isprintable()
    assert hint is not None
    assert hint.isprintable()
    assert len(message) < 150


def test_plan_takes_its_own_format_and_ignores_that_of_train():
    assert parse_plan(["s"], {"DISTLAUNCH_FORMAT": "jsonl"}) == (
        TrainOptions(script="s"),
        "table",
        False,
    )
    assert parse_plan(["--format", "json", "--expand", "s"], {})[1:] == ("json", True)
    with pytest.raises(UsageError, match=r"^--format .* 'rich'$"):
        parse_plan(["--format", "rich", "s"], {})


@pytest.mark.parametrize(
    ("words", "environ", "values"),
    [
        ((), {"HOSTS": "a,b", "SOURCE": "flags"}, {"hosts": "a,b", "source": "flags"}),
        (
            ("--hosts", "c"),
            {"HOSTFILE": "f", "SOURCE": "slurm", "NODE_RANK": "1"},
            {"hosts": "c", "node_rank": 1},
        ),
        (("--discover", "./d"), {"HOSTS": "a"}, {"discover": "./d"}),
        (("--source", "slurm"), {"HOSTS": "a"}, {"source": "slurm"}),
        (("--source", "flags"), {"HOSTS": "a"}, {"hosts": "a", "source": "flags"}),
        (("--hosts", "c", "--source", "slurm"), {}, {"hosts": "c", "source": "slurm"}),
    ],
)
def test_a_list_of_hosts_on_the_command_line_drops_every_other_one_of_the_environment(
    words, environ, values
):
    named = {f"DISTLAUNCH_{name}": value for name, value in environ.items()}
    assert parse(*words, "s", **named) == TrainOptions(script="s", **values)
