"""The real DeepSpeed on CPUs: training under the backend, and the options of its launcher."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from distlaunch.backends.deepspeed import DeepSpeed
from distlaunch.cli.compat.deepspeed.options import OPTIONS
from distlaunch.core.errors import ConfigError
from distlaunch.planning.hosts.hostfile import read_hostfile
from distlaunch.planning.hosts.include_exclude import apply_filters
from tests.launcher import PROGRAMS

# Its environment takes two minutes to make on two cores, once.
pytestmark = pytest.mark.timeout(900)

PROGRAM = PROGRAMS / "frameworks" / "deepspeed_zero.py"
PATIENCE_S = 300
BUFFERS = Path("/dev/shm")


@pytest.fixture(scope="module")
def python(deepspeed_python) -> str:
    return deepspeed_python


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Check after each job that DeepSpeed's CPU collectives left no shared memory (69 MB for each
    worker)."""
    before = {*BUFFERS.glob("deepspeed_*")}
    yield
    left = {*BUFFERS.glob("deepspeed_*")} - before
    for path in left:
        path.unlink(missing_ok=True)
    assert not left


@pytest.fixture(scope="module")
def alone(python) -> list[float]:
    """Return the losses of one process that takes the whole batch, without DeepSpeed."""
    return losses_in(reported(python, PROGRAM))


def reported(python, *words: str | os.PathLike[str]) -> str:
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_in(text: str) -> list[float]:
    return json.loads(text.partition("losses ")[2].splitlines()[0])


def configuration(folder, stage: int):
    path = folder / "ds.json"
    zero = {"stage": stage}
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 64,
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
            }
        )
    )
    return path


# --- it trains


@pytest.mark.parametrize("stage", [1, 3])
def test_two_workers_under_zero_have_the_losses_of_one_process(distlaunch, python, alone, stage):
    configuration(distlaunch.work, stage)
    chosen = ["-o", "config=ds.json", "-o", "pass-config=deepspeed", "-o", "local-rank=on"]
    words = [
        "--backend",
        "deepspeed",
        "--num-procs",
        "2",
        "--format",
        "plain",
        "--python",
        python,
        *chosen,
    ]
    result = distlaunch.train(*words, PROGRAM, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stderr
    assert f"stage {stage} of 2" in "\n".join(result.lines_of(1))
    assert losses_in("\n".join(result.lines_of(0))) == pytest.approx(alone, rel=1e-4)


def test_a_command_line_of_its_launcher_trains_as_well(distlaunch, python, alone):
    configuration(distlaunch.work, 0)
    words = [
        "deepspeed",
        "--num_gpus",
        "2",
        "--python",
        python,
        PROGRAM,
        "--deepspeed_config",
        "ds.json",
    ]
    result = distlaunch.run(words, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stderr
    assert losses_in("\n".join(result.lines_of(0))) == pytest.approx(alone, rel=1e-4)


def test_an_accelerate_script_comes_to_zero_by_the_options_alone(distlaunch, python):
    program = PROGRAMS / "frameworks" / "deepspeed_accelerate.py"
    words = [
        "--backend",
        "deepspeed",
        "-o",
        "zero=2",
        "--num-procs",
        "1",
        "--python",
        python,
        program,
    ]
    result = distlaunch.train(*words, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stderr
    assert "ran DEEPSPEED 1 2" in result.stdout


def test_accelerates_own_launcher_sets_the_same_variables(python):
    chosen = {
        "zero": "3",
        "offload-param": "cpu",
        "gradient-accumulation": 4,
        "precision": "bf16",
        "config": "ds.json",
    }
    flags = (
        "--use_deepspeed --zero_stage 3 --offload_param_device cpu --gradient_accumulation_steps 4 "
        "--mixed_precision bf16 --deepspeed_config_file ds.json s.py"
    )
    code = (
        "import json, sys; from accelerate.commands.launch import launch_command_parser;"
        "from accelerate.utils.launch import prepare_deepspeed_cmd_env;"
        "args = launch_command_parser().parse_args(sys.argv[1:]); args.num_machines, args.num_processes = 1, 1;"
        "args.deepspeed_fields_from_accelerate_config = '';"
        "print('env', json.dumps(prepare_deepspeed_cmd_env(args)[1]))"
    )
    theirs = json.loads(reported(python, "-c", code, *flags.split()).partition("env ")[2])
    text = json.dumps(
        {
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}},
        }
    )
    ours = DeepSpeed(chosen, {"config": text})._zero_variables()
    assert {name: theirs.get(name) for name in ours} == ours


# --- its launcher


def test_workers_get_what_its_launcher_gives_them(distlaunch, python, tmp_path):
    script = tmp_path / "show.py"
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "MASTER_ADDR",
    ]
    script.write_text(
        "import json, os, sys\n"
        f"got = {{name: os.environ.get(name) for name in {names}}}\n"
        "open('got-' + os.environ['RANK'], 'w').write(json.dumps([got, sys.argv[1:]]))\n"
    )
    words = ["--num_gpus", "2", str(script), "-x", "1"]

    def got(folder):
        return [json.loads((folder / f"got-{rank}").read_text()) for rank in range(2)]

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    subprocess.run(
        [python, "-m", "deepspeed.launcher.runner", *words],
        cwd=theirs,
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    result = distlaunch.run(["deepspeed", "--python", python, *words], timeout=PATIENCE_S)
    assert result.returncode == 0, result.stderr
    assert got(distlaunch.work) == got(theirs)


def test_every_option_of_its_launcher_is_known_here(python):
    code = (
        "import argparse, json; from deepspeed.launcher import runner\n"
        "def show(parser, args=None):\n"
        "    print('options', json.dumps([action.option_strings for action in parser._actions]))\n"
        "argparse.ArgumentParser.parse_args = show\n"
        "runner.parse_args()"
    )
    theirs = json.loads(reported(python, "-c", code).partition("options ")[2])
    known = {flag for option in OPTIONS for flag in option.all_flags} | {"-h", "--help"}
    written = [flag.replace("_", "-") for flags in theirs for flag in flags]
    assert "--num-gpus" in written
    assert [flag for flag in written if flag not in known] == []


HOSTFILE = "# all of them\nw0 slots=2\nw1 slots=4  # fast\n\nw2.site   slots=1\n"
FILTERS = [
    ("w0@w1:0,2", ""),
    ("w1:3,0,3", ""),
    ("w2.site@w0", ""),
    ("w1", ""),
    ("w1:0@w1:2", ""),
    ("", "w1:0"),
    ("", "w0@w1:1,2"),
    ("", "w0:0,1"),
    ("", ""),
    ("w3", ""),
    ("w0:2", ""),
    ("", "w0:7"),
]


def test_its_host_files_and_filters_choose_the_same_slots(python):
    code = (
        "import json, sys; from deepspeed.launcher import runner\n"
        "pool, found = runner._parse_hostfile(sys.argv[1].splitlines()), []\n"
        "for include, exclude in json.loads(sys.argv[2]):\n"
        "    try: found.append(list(runner.parse_inclusion_exclusion(pool, include, exclude).items()))\n"
        "    except ValueError: found.append('refused')\n"
        "print('found', json.dumps(found))"
    )
    theirs = json.loads(
        reported(python, "-c", code, HOSTFILE, json.dumps(FILTERS)).partition("found ")[2]
    )
    hosts = read_hostfile(HOSTFILE, "hostfile")

    def ours(include: str, exclude: str) -> object:
        try:
            chosen = apply_filters(hosts, include or None, exclude or None)
        except ConfigError:
            return "refused"
        return [[each.host.name, list(each.slots or ())] for each in chosen]

    for filters, there in zip(FILTERS, theirs, strict=True):
        in_order = there if there == "refused" else [[host, sorted(slots)] for host, slots in there]
        assert ours(*filters) == in_order, filters
