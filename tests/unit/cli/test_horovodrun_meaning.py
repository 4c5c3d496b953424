from __future__ import annotations

import os
import sys

import pytest

from distlaunch.cli.compat.drop_in import Translation
from distlaunch.cli.compat.horovodrun.command import horovodrun
from distlaunch.cli.compat.horovodrun.options import COMMAND_OPTIONS, OPTIONS
from distlaunch.cli.compat.horovodrun.translate import translate
from distlaunch.cli.parser import scan
from distlaunch.core.errors import ConfigError, LaunchError, UsageError
from distlaunch.core.model.option_names import Opt, use_names
from distlaunch.planning.build_plan import preloaded_modules
from distlaunch.planning.train_options import advice_on_cpu_workers, use_cpus
from tests.facts import mentions

COMMAND = ("python3.99", "train.py", "-np", "--lr=1")


def meaning(*words: str, command: tuple[str, ...] = COMMAND, **environ: str) -> Translation:
    return translate(*scan([*words, *command], OPTIONS, abbreviated=COMMAND_OPTIONS), environ)


def options(*words: str, **more):
    return meaning(*words, **more).options


def refused(*words: str, **more) -> LaunchError:
    with pytest.raises(UsageError) as caught:
        meaning(*words, **more)
    return caught.value


@pytest.mark.parametrize(
    "words", [["-np", "3"], ["-np=3"], ["-np3"], ["-n", "3"], ["-n=3"], ["--num-p", "3"]], ids=str
)
def test_np_is_taken_however_it_is_written(words):
    assert options(*words).hosts == "localhost:3"


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (
            ["-np", "2"],
            "COMMAND is missing",
            "it comes after our options: [OPTIONS] COMMAND [ARGS]...",
        ),
        (
            ["--np", "2", "a"],
            "unknown option '--np'",
            "did you mean -np? Options of the script go after COMMAND.",
        ),
        (
            ["--nproc", "2", "a"],
            "unknown option '--nproc'",
            "-np N; or distlaunch torchrun, which takes it as it is",
        ),
        (["-n2", "a"], "unknown option '-n'", "-np N"),
        (["-np", "x", "a"], "-np takes a whole number >= 1, not 'x'", None),
    ],
    ids=str,
)
def test_an_error_in_a_command_line_quotes_its_words(words, says, hint):
    with pytest.raises(UsageError) as caught:
        horovodrun(words, {})
    assert (caught.value.message, caught.value.hint) == (says, hint)


def test_a_script_without_a_python_is_led_to_one(tmp_path):
    error = refused("-np", "2", command=("hvd.py", "--lr=1"), PATH=str(tmp_path))
    assert mentions(error.message, "hvd.py", "PATH")
    assert mentions(error.hint, "python hvd.py")
    assert options("-np", "2", command=("./hvd.py",), PATH=str(tmp_path)).script == "./hvd.py"
    (tmp_path / "hvd.py").touch(0o755)
    assert options("-np", "2", command=("hvd.py",), PATH=str(tmp_path)).script == "hvd.py"


def test_np_alone_is_this_machine():
    found = options("-np", "4")
    assert (found.backend, found.hosts, found.env, found.no_python) == (
        "horovod",
        "localhost:4",
        (),
        False,
    )
    assert (found.script, found.script_args, found.python) == (
        "train.py",
        ("-np", "--lr=1"),
        "python3.99",
    )


@pytest.mark.parametrize(
    ("command", "script", "args", "kind"),
    [
        (("python", "-u", "a.py", "-m"), "a.py", ("-m",), "python"),
        (("/opt/x/bin/python3.12", "a.py"), "a.py", (), "python"),
        (("python3", "-m", "pkg.mod", "x"), "pkg.mod", ("x",), "module"),
        (("python", "-c", "pass"), "python", ("-c", "pass"), "any"),
        (("python", "-X", "dev", "a.py"), "python", ("-X", "dev", "a.py"), "any"),
        (("python",), "python", (), "any"),
        (("pythonic", "a.py"), "pythonic", ("a.py",), "any"),
        (("./run.sh", "-np"), "./run.sh", ("-np",), "any"),
        (("--", "./run.sh", "--verbose"), "./run.sh", ("--verbose",), "any"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_script_or_module_of_python_is_distinguished_from_any_other_command(
    command, script, args, kind
):
    found = options("-np", "1", command=command, PATH="/nowhere")
    assert (found.script, found.script_args) == (script, args)
    assert (found.no_python, found.module) == (kind == "any", kind == "module")


def test_our_own_interpreter_needs_no_word():
    folder, name = os.path.split(sys.executable)
    assert options("-np", "1", command=(sys.executable, "a.py")).python is None
    assert options("-np", "1", command=(name, "a.py"), PATH=folder).python is None
    assert options("-np", "1", command=(name, "a.py"), PATH="/nowhere").python == name
    assert (
        options("-np", "1", "--python", "other", command=(sys.executable, "a.py")).python == "other"
    )


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        (["-np", "4", "-H", "a:2,b:2"], "a:2,b:2"),
        (["-H", "a:2,b:2"], "a:2,b:2"),
        (["-np", "3", "-H", "a:2,b:2"], "a:2,b:1"),
        (["-np", "2", "-H", "a:4,b:4"], "a:2"),
        (["-np", "5", "--hosts=n[1-3]:2"], "n1:2,n2:2,n3:1"),
        (["-np", "1", "-H=me@a:4:port=2222"], "me@a:1:port=2222"),
        (["-np=3", "-H", "[::1]:2,b:2"], "[::1]:2,b:1"),
    ],
)
def test_hosts_are_filled_one_after_the_other(words, hosts):
    assert options(*words).hosts == hosts


def test_a_host_file_is_read_for_how_many_slots_it_has(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\na slots=2\nb slots=2\n")
    for flag in ("-hostfile", "--hostfile"):
        assert (options("-np", "4", flag, str(file)).hosts, options(flag, str(file)).hosts) == (
            "a:2,b:2",
            "a:2,b:2",
        )
        some = options("-np", "3", flag, str(file))
        assert (some.hostfile, some.hosts, some.named("hosts")) == (None, "a:2,b:1", "--hostfile")
    assert "only 4 slots" in refused("-np", "5", "--hostfile", str(file)).message
    with pytest.raises(ConfigError, match=r"--hostfile '.*/none': No such file or directory"):
        options("-np", "5", "--hostfile", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(ConfigError, match=r"empty: .* no host"):
        options("--hostfile", str(tmp_path / "empty"))


def test_hosts_are_listed_once(tmp_path):
    for flag, value in (("--hostfile", "nope"), ("--source", "slurm")):
        with pytest.raises(ConfigError, match=f"^--hosts .* {flag} "):
            options("-np", "2", "-H", "localhost:4", flag, value)
    assert options("-H", "a:2", DISTLAUNCH_HOSTFILE="nope").hosts == "a:2"  # the command line wins


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["-p", "2222"], "ssh_port", 2222),
        (["-p2222"], "ssh_port", 2222),
        (["-i", "key"], "ssh_key", "key"),
        (["--ssh-identity-file=key"], "ssh_key", "key"),
        (["--start-timeout", "40"], "join_timeout", 40.0),
        (["--start", "40"], "join_timeout", 40.0),
        (["--network-interface", "eth0", "--network-interfaces=eth0"], "interface", "eth0"),
        (["--verbose"], "explain", True),
        (["--gloo", "--disable-cache"], "hosts", "localhost:2"),
        (["--output-filename", "out"], "log_dir", "out"),
        (["--tcp"], "env", ("NCCL_IB_DISABLE=1",)),
        (["--fusion-threshold-mb", "8"], "opt", ("fusion-threshold-mb=8",)),
        (["--fusion_threshold_mb", "0"], "opt", ("fusion-threshold-mb=0",)),
        (["--cycle-time-ms=0.5"], "opt", ("cycle-time-ms=0.5",)),
        (["--cache", "0"], "opt", ("cache-capacity=0",)),
        (["--hierarchical-allreduce"], "opt", ("hierarchical-allreduce=1",)),
        (["--no-torus-allreduce"], "opt", ("torus-allreduce=off",)),
        (["--autotune-log-file", "f", "--autotune"], "opt", ("autotune=1", "autotune-log-file=f")),
        (["--timeline-filename", "t.json"], "opt", ("timeline-filename=t.json",)),
        (["--no-stall-check"], "opt", ("stall-check=off",)),
        (
            ["--stall-check-shutdown-time-seconds", "9"],
            "opt",
            ("stall-check-shutdown-time-seconds=9",),
        ),
        (["--log-level", "DEBUG"], "opt", ("log-level=debug",)),
        (["--log-hide-timestamp"], "opt", ("log-with-timestamp=off",)),
        (["--log-with-timestamp"], "opt", ("log-with-timestamp=1",)),
        (
            ["--gloo-timeout-seconds", "90", "-o", "compression=fp16"],
            "opt",
            ("gloo-timeout-seconds=90", "compression=fp16"),
        ),
        (["--max-restarts", "3"], "max_restarts", 3),
    ],
    ids=str,
)
def test_a_word_becomes_an_option_of_train(words, field, value):
    assert getattr(options("-np", "2", *words), field) == value


def test_messages_speak_of_what_was_typed():
    typed = options("-np", "2", "--preload", "json", PATH="/nowhere")
    with use_names(typed.dialect.names):
        assert Opt.PYTHON("python3.99") == "python3.99"
        assert advice_on_cpu_workers(several=False) == ""
        assert use_cpus(several=True) == "--device cpu asks for workers without GPUs"
        assert Opt.NUM_PROCS(2) == Opt.NUM_GPUS(2) == "-np 2"
        assert Opt.GPUS_PER_NODE(2) == Opt.PROCS_PER_NODE(2) == "-H a:2,b:2"
        with pytest.raises(ConfigError) as caught:
            preloaded_modules(typed)
    assert caught.value.message == "--preload and python3.99 exclude each other"
    with use_names(options("-np", "2", "--python", "x").dialect.names):
        assert Opt.PYTHON("x") == "--python x"
    program = options("-np", "2", "--preload", "json", command=("./run.sh",))
    with pytest.raises(ConfigError) as caught, use_names(program.dialect.names):
        preloaded_modules(program)
    assert caught.value.message == "--preload: the command is no Python with script or module"


def test_files_are_named_as_horovodruns():
    layout = options("-H", "a:6,b:5", "--output-filename", "out").dialect.layout
    assert layout.log_path("/r", 0, 3, 1) == "/r/attempt-0/rank.03/stdout"
    assert options("-np", "1", "--output-filename", "out").dialect.layout.log_path("/r", 1, 0) == (
        "/r/attempt-1/rank.0/stderr"
    )


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        ([], "-np is missing", "-H a:2,b:2"),
        (["-np", "0"], "takes a whole number >= 1", ""),
        (["-np", "5", "-H", "a:2,b:2"], "the hosts have only 4 slots", "a:4,b:4"),
        (["-np", "5", "-H", "a:2,b"], "how many slots b has", "b:4"),
        (
            ["--min-np", "2", "-np", "2"],
            "--min-np: elastic Horovod is not offered",
            "--discover CMD",
        ),
        (
            ["--host-discovery-script", "./d", "-np", "2"],
            "elastic Horovod",
            "resumes from its checkpoint",
        ),
        (["--blacklist-cooldown-range", "1", "2"], "elastic Horovod", "--max-restarts"),
        (["-np", "2", "--mpi"], "not by MPI", "mpirun -np N"),
        (["-np", "2", "--mpi-args=--map-by node"], "--mpi-args: ", "mpirun"),
        (["-np", "2", "--binding-args=x"], "mpirun's", "--bind cores"),
        (["-np", "2", "-prefix-timestamp"], "no time", "--format jsonl"),
        (["-np", "2", "--network-interfaces", "a,b"], "uses one of them", "10.0.0.0/16"),
        (["-np", "2", "--autotune", "--no-autotune"], "exclude each other", ""),
        (["-np", "2", "--cycle-time-ms", "fast"], "takes a number >= 0, not 'fast'", ""),
        (["-np", "2", "--log-level", "loud"], "TRACE, DEBUG", ""),
        (["-np", "2", "--autotune-gaussian-process-noise", "2"], "from 0 to 1", ""),
        (["-np", "2", "--hier"], "the beginning of several options", ""),
        (["-np", "2", "--num-gpus", "2"], "unknown option", ""),
    ],
    ids=str,
)
def test_an_unsupported_option_is_refused_with_its_replacement(words, says, hint):
    error = refused(*words)
    assert says in error.message
    assert hint in (error.hint or "")


def test_options_without_effect_are_reported_in_horovodruns_words():
    with use_names(options("-np", "2").dialect.names):
        assert Opt.OPT("autotune-log-file") == "--autotune-log-file"
        assert Opt.OPT("config") == "-o config"


def test_workers_of_one_machine_in_a_schedulers_job_are_reported():
    (notice,) = meaning("-np", "2", SLURM_JOB_ID="1").notices
    assert mentions(notice, "2 workers", "--source slurm")
    assert meaning("-np", "2", "-H", "a:2", SLURM_JOB_ID="1").notices == ()
    assert options("-np", "4", "--source", "slurm").num_gpus == 4
    assert options("-np", "4", "--source", "slurm", "--device", "cpu").num_procs == 4


def test_the_time_to_start_may_come_from_its_variable():
    assert options("-np", "1", HOROVOD_START_TIMEOUT="90").join_timeout == 90
    assert options("-np", "1", "--start-timeout", "5", HOROVOD_START_TIMEOUT="90").join_timeout == 5
    with pytest.raises(ConfigError, match="HOROVOD_START_TIMEOUT"):
        meaning("-np", "1", HOROVOD_START_TIMEOUT="long")


CONFIG = """\
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 0.5
  hierarchical_allreduce: true
autotune:
  enabled: false
  log_file: tuned.csv
timeline:
  filename: t.json
  mark_cycles: yes
stall_check:
  enabled: false
library_options:
  gloo_timeout_seconds: 60
logging:
  level: INFO
  with_timestamp: false
"""


def test_a_configuration_file_sets_what_the_command_line_does_not(tmp_path):
    file = tmp_path / "conf.yaml"
    file.write_text(CONFIG)
    found = meaning(
        "-np", "2", "--config-file", str(file), "--fusion-threshold-mb", "8", "--stall-check"
    )
    assert found.options.opt == (
        "fusion-threshold-mb=8",
        "cycle-time-ms=0.5",
        "hierarchical-allreduce=True",
        "autotune=False",
        "autotune-log-file=tuned.csv",
        "timeline-filename=t.json",
        "timeline-mark-cycles=True",
        "stall-check=1",
        "gloo-timeout-seconds=60",
        "log-level=info",
        "log-with-timestamp=False",
    )


def test_a_section_of_the_configuration_may_stand_in_one_line(tmp_path):
    file = tmp_path / "conf.yaml"
    file.write_text(
        "params: {fusion_threshold_mb: 32, cycle_time_ms: 0.5}  # ours\ntimeline: {filename: 'a, b'}\n"
    )
    found = meaning("-np", "2", "--config-file", str(file))
    assert found.options.opt == (
        "fusion-threshold-mb=32",
        "cycle-time-ms=0.5",
        "timeline-filename=a, b",
    )


def test_the_command_line_has_the_last_word_on_settings(tmp_path):
    (tmp_path / "c").write_text("params:\n  cycle_time_ms: 2\n  cache_capacity: 3\n")
    found = options("-np", "2", "--config-file", str(tmp_path / "c"), "-o", "CYCLE_TIME_MS=5")
    assert found.opt == ("cache-capacity=3", "CYCLE_TIME_MS=5")
    found = options(
        "-np", "2", "--cycle-time-ms", "4", DISTLAUNCH_OPT="cycle-time-ms=5 compression=fp16"
    )
    assert found.opt == ("cycle-time-ms=4", "compression=fp16")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "params:\n  fusion_threshold_mb: much\n",
            ":2: fusion_threshold_mb takes a whole number >= 0, not 'much'",
        ),
        ("stall_check:\n  enabled: 7\n", ":2: enabled takes true or false, not '7'"),
        ("controller: mpi\n", ":1: workers are controlled by gloo here, not by 'mpi'"),
        ("params: 7\n", ":1: params takes a mapping"),
    ],
)
def test_a_configuration_that_is_not_right_is_named_by_its_line(tmp_path, text, says):
    file = tmp_path / "conf.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        meaning("-np", "2", "--config-file", str(file))
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "params:\n  fusion_treshold_mb: 1\n",
            ":2: horovodrun has no 'fusion_treshold_mb', and it changes nothing",
        ),
        (
            "parms:\n  cycle_time_ms: 1\n",
            ":1: horovodrun has no 'parms', and it changes nothing: did you mean params?",
        ),
        (
            "# ours\nparams: {cycle_tme_ms: 1}\n",
            ":2: horovodrun has no 'cycle_tme_ms', and it changes nothing",
        ),
    ],
)
def test_keys_of_a_configuration_that_horovodrun_passes_over_are_a_warning(tmp_path, text, says):
    file = tmp_path / "conf.yaml"
    file.write_text(f"{text}logging:\n  level: INFO\n")
    found = meaning("-np", "2", "--config-file", str(file))
    (notice,) = found.notices
    assert says in notice
    assert found.options.opt == ("log-level=info",)


def test_a_configuration_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "conf.yaml"
    file.write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError, match=f"{file}:1: "):
        meaning("-np", "2", "--config-file", str(file))


def test_a_configuration_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="--config-file /nowhere/c"):
        meaning("-np", "2", "--config-file", "/nowhere/c")
