from __future__ import annotations

import pytest

from distlaunch.cli.compat.torchrun.command_line import parse
from distlaunch.cli.compat.torchrun.options import BY_VARIABLE, PREFIX
from distlaunch.cli.compat.torchrun.translate import (
    OutputOptions,
    TorchrunTranslation,
    translate,
    unread_variables,
)
from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.option_names import Opt, use_names
from distlaunch.core.model.run_files import TORCHRUN
from distlaunch.planning.build_plan import preloaded_modules
from tests.facts import mentions


def meaning(*words: str, **environ: str) -> TorchrunTranslation:
    return translate(parse([*words, "s.py", "a"], environ), environ)


def refused(*words: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        meaning(*words, **environ)
    return caught.value.message


def test_a_plain_command_is_one_quiet_worker_with_torchruns_files():
    options = meaning().options
    assert (options.script, options.script_args, options.workers) == ("s.py", ("a",), 1)
    assert options.dialect.layout is TORCHRUN
    assert options.quiet
    assert (options.master_addr, options.master_port, options.dialect.run_id) == (None, None, None)
    assert (options.grace, options.failure_grace, options.max_restarts) == (30.0, 30.0, 0)
    assert options.dialect.prefix_columns == 0


# --- address and port


@pytest.mark.parametrize(
    ("words", "master"),
    [
        (["--standalone"], (None, None)),
        (["--standalone", "--master-port", "29500"], (None, None)),
        (["--master-port", "29500"], ("127.0.0.1", 29500)),
        (["--master-port", "0"], ("127.0.0.1", None)),
        (["--master-addr", "node1", "--master-port", "1234"], ("node1", 1234)),
        (["--master-addr", "node1"], (None, None)),
        (["--master-addr", "[::1]", "--master-port", "1234"], ("::1", 1234)),
        (["--rdzv-endpoint", "127.0.0.1:29500"], ("127.0.0.1", 29500)),
        (["--rdzv-endpoint", "localhost:0"], ("localhost", None)),
        (["--rdzv-endpoint", "[::1]:4000"], ("::1", 4000)),
        (["--rdzv-backend=c10d", "--rdzv-endpoint", "[::1]"], (None, None)),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400"], (None, None)),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"], (None, None)),
        (["--rdzv-backend", "etcd", "--rdzv-endpoint", "etcd.example.org:2379"], (None, None)),
        (["--local-addr", "10.0.0.7"], ("10.0.0.7", None)),
        (
            ["--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--local-addr", "10.0.0.7"],
            ("10.0.0.7", None),
        ),
    ],
    ids=str,
)
def test_rank_0s_address_and_port_are_those_of_a_static_rendezvous(words, master):
    options = meaning(*words).options
    assert (options.master_addr, options.master_port) == master


@pytest.mark.parametrize("endpoint", ["h", "[::1]", "10.0.0.7"])
@pytest.mark.parametrize("nnodes", ["1", "2"])
def test_a_static_endpoint_needs_a_port(endpoint, nnodes):
    shown = refused("--nnodes", nnodes, "--rdzv-endpoint", endpoint)
    assert mentions(shown, "--rdzv-endpoint", "HOST:PORT", f"'{endpoint}'")
    assert meaning("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    assert meaning("--standalone", "--rdzv-endpoint", endpoint)


@pytest.mark.parametrize(
    "conf", ["a=", "a,b=1", ",,", "a=1,", "=1", "join_timeout=''", "timeout=x"]
)
@pytest.mark.parametrize(
    "words", [[], ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:5"]], ids=["1", "2"]
)
def test_a_malformed_rdzv_conf_is_refused_whatever_the_number_of_nodes(conf, words):
    assert refused(*words, "--rdzv-conf", conf).startswith("--rdzv-conf takes ")


def test_quotes_around_a_value_of_rdzv_conf_are_no_part_of_it():
    words = [
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=h:5",
        "--rdzv-conf",
        "x=' ',join_timeout='7'",
    ]
    with pytest.raises(ConfigError):
        meaning(*words)
    assert meaning(*words[:-1], "x=\"a b\", join_timeout='7'").options.join_timeout == 7.0


def legacy(*words: str) -> TorchrunTranslation:
    return translate(parse([*words, "s.py", "a"], {}), {}, legacy=True)


def test_under_torch_distributed_launch_the_script_gets_its_local_rank_unless_it_uses_the_environment():
    assert legacy().options.script_args == ("--local-rank=${local_rank}", "a")
    assert (
        legacy("--use_env").options.script_args == legacy("--use-env").options.script_args == ("a",)
    )
    assert meaning("--use_env").options.script_args == ("a",)
    assert meaning("--use_env").notices == ()


def test_under_torch_distributed_launch_a_program_that_is_no_script_has_to_use_the_environment():
    with pytest.raises(UsageError, match=r"--no-python .* --use-env"):
        legacy("--no-python")
    assert legacy("--no-python", "--use-env").options.no_python


@pytest.mark.parametrize(
    "endpoint", ["h:x", "h:70000", ":29500", "a b:1", "h:", "[::1", "[::1:5", "::1]:5"]
)
def test_a_bad_endpoint_is_refused_where_it_was_written(endpoint):
    assert refused("--rdzv-endpoint", endpoint).startswith("--rdzv-endpoint ")
    assert refused(PET_RDZV_ENDPOINT=endpoint).startswith("PET_RDZV_ENDPOINT ")


# --- nodes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:5"],
            (2, None, "h:5", None, 600.0),
        ),
        (
            ["--nnodes=2:4", "--rdzv-backend=c10d", "--rdzv-endpoint=h"],
            ((2, 4), None, "h:29400", None, 600.0),
        ),
        (
            ["--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=[fd00::1]:5"],
            ((1, 4), None, "[fd00::1]:5", None, 600.0),
        ),
        (
            ["--nnodes=2", "--node-rank=1", "--rdzv-backend=c10d", "--rdzv-endpoint=h:5"],
            (2, 1, "h:5", None, 600.0),
        ),
        (
            ["--nnodes=2", "--node-rank=1", "--master-addr=h", "--master-port=7"],
            (2, 1, "h:7", "h", 600.0),
        ),
        (["--nnodes=2", "--rdzv-endpoint=h:7"], (2, 0, "h:7", "h", 600.0)),
        (
            ["--nnodes=2", "--rdzv-endpoint=h:7", "--rdzv-conf=timeout=30,join_timeout=9"],
            (2, 0, "h:7", "h", 9.0),
        ),
        (
            ["--nnodes=2", "--rdzv-endpoint=h:7", "--rdzv-conf", "timeout=30"],
            (2, 0, "h:7", "h", 30.0),
        ),
    ],
    ids=str,
)
def test_several_nodes_have_the_rendezvous_of_torchrun(words, expected):
    options = meaning(*words).options
    found = (
        options.num_nodes,
        options.node_rank,
        options.rendezvous,
        options.master_addr,
        options.join_timeout,
    )
    assert found == expected
    assert (options.master_port, options.source) == (None, "flags")


@pytest.mark.parametrize(
    "conf",
    [
        *(
            "join_timeout=nan",
            "join_timeout=-1",
            "join_timeout=0",
            "join_timeout=1e400",
            "join_timeout=1,timeout=2.5",
        ),
        *("timeout=", "=,=", "timeout", "timeout=5,", ",", "join_timeout=1234567890"),
    ],
)
def test_a_bad_rdzv_conf_is_refused_as_torchrun_refuses_it(conf):
    words = ["--nnodes=2", "--rdzv-endpoint=h:7"]
    assert refused(*words, "--rdzv-conf", conf).startswith("--rdzv-conf takes ")
    assert refused(*words, PET_RDZV_CONF=conf).startswith("PET_RDZV_CONF takes ")
    assert (
        meaning(*words, "--rdzv-conf", " read_timeout=x , timeout = 5").options.join_timeout == 5.0
    )


def test_an_error_names_the_option_that_was_given():
    def named(*words: str) -> str:
        with use_names(meaning("--nnodes=2", *words).options.dialect.names):
            return f"{Opt.RENDEZVOUS}, {Opt.MASTER_ADDR}"

    assert named("--rdzv-endpoint=h:7") == "--rdzv-endpoint, --rdzv-endpoint"
    assert named("--master-addr=h", "--master-port=7") == "--master-addr, --master-addr"
    assert named("--rdzv-backend=c10d", "--rdzv-endpoint=h:7") == "--rdzv-endpoint, --local-addr"


def test_nodes_without_a_rendezvous_are_refused_and_a_variable_is_named():
    assert mentions(refused("--nnodes=2"), "--nnodes 2")
    assert mentions(refused("--nnodes=2:4"), "--nnodes 2:4")
    assert mentions(refused(PET_NNODES="2"), "PET_NNODES", "2")
    assert mentions(refused("--node-rank=1"), "--nnodes 1:1", "--node-rank 1", "exclude")
    assert mentions(refused("--nnodes=2", "--standalone"), "--standalone", "--nnodes 2", "exclude")
    assert meaning("--nnodes=1:1", "--node-rank=0").notices == ()
    assert meaning("--nnodes=1:1", "--node-rank=0").options.rendezvous is None


def test_a_range_of_nodes_without_an_endpoint_runs_one_with_a_notice():
    shown = "--nnodes 1:4: this one node runs; --rdzv-endpoint lets others join"
    assert meaning("--nnodes=1:4").notices == (shown,)
    assert meaning(PET_NNODES="1:4").notices == ()
    assert meaning("--nnodes=1:4").options.num_nodes is None


# --- what runs


def test_the_command_is_chosen_as_torchrun_chooses_it():
    assert meaning("-m").options.module
    assert meaning("--no-python").options.no_python
    run_path = meaning("--run-path", "--no-python", PYTHON_EXEC="/opt/python").options
    assert (run_path.no_python, run_path.module, run_path.python) == (False, False, None)
    assert meaning(PYTHON_EXEC="/opt/python").options.python == "/opt/python"
    assert meaning("--no-python", PYTHON_EXEC="/opt/python").options.python is None
    with pytest.raises(UsageError, match=r"--module .* --no-python"):
        meaning("-m", "--no-python")


@pytest.mark.parametrize(
    ("words", "env", "other"),
    [((), {"PYTHON_EXEC": "/opt/python"}, "PYTHON_EXEC"), (("--no-python",), {}, "--no-python")],
)
def test_an_option_that_excludes_preload_is_named_as_the_user_wrote_it(words, env, other):
    options = meaning(*words, DISTLAUNCH_PRELOAD="torch", **env).options
    with pytest.raises(ConfigError) as caught, use_names(options.dialect.names):
        preloaded_modules(options)
    assert caught.value.message == f"DISTLAUNCH_PRELOAD and {other} exclude each other"


def test_an_option_that_came_from_a_variable_is_named_by_that():
    def named(option: Opt, *words: str, **environ: str) -> str:
        with use_names(meaning(*words, **environ).options.dialect.names):
            return option("/x")

    assert named(Opt.LOG_DIR, PET_LOG_DIR="/x") == "PET_LOG_DIR=/x"
    assert named(Opt.LOG_DIR, DISTLAUNCH_LOG_DIR="/x") == "DISTLAUNCH_LOG_DIR=/x"
    assert named(Opt.LOG_DIR, "--log-dir", "/x", PET_LOG_DIR="/y") == "--log-dir /x"
    assert named(Opt.NUM_PROCS, PET_NPROC_PER_NODE="2") == "PET_NPROC_PER_NODE=/x"


# --- failure


@pytest.mark.parametrize(
    ("words", "environ", "grace"),
    [
        (["--shutdown-timeout", "5"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, 5.0),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, 9.0),
        ([], {"PET_SHUTDOWN_TIMEOUT": "7", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, 7.0),
        (["--shutdown-timeout=0"], {}, 0.0),
    ],
    ids=str,
)
def test_the_shutdown_timeout_holds_for_every_stop(words, environ, grace):
    options = meaning(*words, **environ).options
    assert (options.grace, options.failure_grace) == (grace, grace)


def test_our_own_variable_may_shorten_the_stop_after_a_failure():
    options = meaning(DISTLAUNCH_FAILURE_GRACE="2").options
    assert (options.grace, options.failure_grace) == (30.0, 2.0)


def test_a_bad_shutdown_timeout_is_named():
    assert refused(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="soon").startswith(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT takes"
    )


# --- ours by variable


def test_our_variables_reach_the_options_and_sizes_do_not():
    options = meaning(
        DISTLAUNCH_PRELOAD="torch",
        DISTLAUNCH_HANG_TIMEOUT="60",
        DISTLAUNCH_FORMAT="jsonl",
        DISTLAUNCH_ENV="A=1 B=2",
        DISTLAUNCH_LOG_DIR="/logs",
        DISTLAUNCH_NUM_GPUS="4",
    ).options
    assert (options.preload, options.hang_timeout, options.format) == ("torch", 60.0, "jsonl")
    assert (options.env, options.log_dir, options.num_gpus) == (("A=1", "B=2"), "/logs", None)
    assert meaning("--log-dir", "here", DISTLAUNCH_LOG_DIR="/logs").options.log_dir == "here"


def test_our_own_lines_are_shown_only_where_that_is_asked_for():
    assert (meaning().options.quiet, meaning().silent) == (True, False)
    assert meaning(DISTLAUNCH_QUIET="0").options.quiet is False
    assert meaning(DISTLAUNCH_QUIET="1").silent is True


@pytest.mark.parametrize(
    ("mode", "bind"),
    [("node", "numa"), ("socket", "numa"), ("exclusive", "cores"), ("core-complex", "cores")],
)
def test_numa_binding_is_ours(mode, bind):
    assert meaning("--numa-binding", mode).options.bind == bind
    assert meaning(DISTLAUNCH_BIND="cores").options.bind == "cores"


# --- what the console shows


@pytest.mark.parametrize(
    ("words", "modes"),
    [
        ([], ["raw", "raw", "raw", "raw"]),
        (["-r", "3"], ["hidden", "hidden", "hidden", "hidden"]),
        (["-r", "1"], ["hidden", "raw", "hidden", "raw"]),
        (["-t", "3"], ["tee", "tee", "tee", "tee"]),
        (["-r", "3", "-t", "0:2"], ["hidden", "tee", "hidden", "hidden"]),
        (["-r", "0:1,1:2"], ["hidden", "raw", "raw", "hidden"]),
        (["--local-ranks-filter", "1"], ["hidden", "hidden", "raw", "raw"]),
        (["--local-ranks-filter", "1", "-t", "1"], ["hidden", "hidden", "tee", "raw"]),
        (["-t", "3", "--log-dir", "/dev/null"], ["raw", "raw", "raw", "raw"]),
    ],
    ids=str,
)
def test_each_stream_is_raw_teed_or_hidden(words, modes):
    display = meaning(*words).display
    assert [display.mode(rank, stream) for rank in (0, 1) for stream in (1, 2)] == modes
    assert display.is_raw is (set(modes) == {"raw"})


def test_the_prefix_is_torchruns_or_the_templates():
    assert OutputOptions().prefix(12, "host", rank=14) == b"[default12]:"
    assert meaning("--role", "trainer").display.prefix(1, "host", rank=3) == b"[trainer1]:"
    template = "<${role_name} $rank/${local_rank}@${hostname} ${other} $$>"
    assert (
        meaning("--log-line-prefix-template", template).display.prefix(1, "h", rank=3)
        == b"<default 3/1@h ${other} $>"
    )
    assert (
        meaning(TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="${rank}|").display.prefix(1, "h", rank=3)
        == b"3|"
    )
    assert meaning().display.template == PREFIX


def test_ranks_that_the_job_does_not_have_are_reported():
    display = meaning("-r", "12:3", "--local-ranks-filter", "0,1").display
    (notice,) = display.beyond(2)
    assert mentions(notice, "--redirects", "rank 12", "1")
    assert display.beyond(13) == []


# --- what is said once


def test_options_of_the_command_line_without_effect_are_reported_in_one_line():
    words = [
        "--monitor-interval=1",
        "--start-method",
        "fork",
        "--rdzv-conf",
        "timeout=3",
        "--rdzv-backend=etcd-v2",
    ]
    (notice,) = meaning(*words).notices
    assert mentions(
        notice, "--rdzv-conf", "--monitor-interval", "--start-method", "--rdzv-backend 'etcd-v2'"
    )
    assert meaning(PET_MONITOR_INTERVAL="5", PET_RDZV_BACKEND="etcd").notices == ()


@pytest.mark.parametrize(
    "words",
    [
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=1"],
        ["--standalone", "--nnodes=1", "--nproc-per-node=2"],
        ["--signals-to-handle", "SIGTERM,SIGINT"],
        ["-t", "3", "--role", "x", "--log-dir", "logs"],
    ],
    ids=" ".join,
)
def test_ordinary_command_lines_are_not_remarked_upon(words):
    assert meaning(*words).notices == ()


def test_a_missing_server_of_torchruns_agent_is_reported():
    (notice,) = meaning(
        TORCHELASTIC_ENABLE_FILE_TIMER="1", TORCHELASTIC_HEALTH_CHECK_PORT="8080"
    ).notices
    assert "TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_HEALTH_CHECK_PORT" in notice
    assert meaning(TORCHELASTIC_ENABLE_FILE_TIMER="0").notices == ()


def test_lines_get_narrower_by_the_prefix_of_tee():
    assert meaning("-t", "3").options.dialect.prefix_columns == len("[default00]:")
    assert meaning("-t", "1", "--role", "x").options.dialect.prefix_columns == len("[x00]:")
    assert meaning("-t", "1", "--role", "Übung").options.dialect.prefix_columns == len(
        "[Übung00]:"
    ), "not its bytes"


def test_signals_that_would_end_the_job_under_torchrun_are_remarked_upon():
    (notice,) = meaning("--signals-to-handle", "SIGTERM,SIGUSR1").notices
    assert "--signals-to-handle" in notice


def test_a_name_in_a_notice_cannot_touch_the_terminal():
    (notice,) = meaning("--rdzv-backend", "a\nb\x1b[31m").notices
    assert notice.isprintable()


# --- the words of train


def test_variables_of_train_that_are_not_read_are_named_with_what_does_the_same():
    (warning,) = unread_variables(
        {"DISTLAUNCH_MAX_RESTARTS": "3", "DISTLAUNCH_GRACE": "3", "DISTLAUNCH_PYTHON": "p"}
    )
    assert "DISTLAUNCH_MAX_RESTARTS (here: --max-restarts or PET_MAX_RESTARTS)" in warning
    assert "DISTLAUNCH_GRACE (here: --shutdown-timeout or PET_SHUTDOWN_TIMEOUT)" in warning
    assert "DISTLAUNCH_PYTHON (here: PYTHON_EXEC)" in warning
    assert (
        unread_variables(
            {"DISTLAUNCH_PRELOAD": "torch", "DISTLAUNCH_QUIET": "1", "DISTLAUNCH_GRACE": ""}
        )
        == []
    )


def test_every_variable_of_train_is_either_read_or_warned_of():
    for option in TRAIN_OPTIONS:
        if option.variable is not None:
            assert (option in BY_VARIABLE) != bool(unread_variables({option.variable: "1"}))


def test_messages_name_options_as_torchrun_does():
    with use_names(meaning().options.dialect.names):
        assert f"{Opt.PYTHON}, {Opt.NUM_PROCS(1)}" == "PYTHON_EXEC, --nproc-per-node 1"
        assert Opt.NUM_PROCS(1) == Opt.NUM_GPUS(1)
        assert Opt.ENV("PYTHONFAULTHANDLER=1") == "PYTHONFAULTHANDLER=1"
        assert Opt.ENV("A=1") == "DISTLAUNCH_ENV=A=1"
        assert f"{Opt.FAILURE_GRACE}" == "--shutdown-timeout"
        assert Opt.FAILURE_GRACE(9) == "DISTLAUNCH_FAILURE_GRACE=9"
        assert f"{Opt.LOG_DIR}, {Opt.LOST_AFTER}" == "--log-dir, distlaunch train --lost-after"
