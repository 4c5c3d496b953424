"""``distlaunch deepspeed`` and ``--backend deepspeed`` as they are typed, without DeepSpeed
itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facts import mentions
from tests.ports import free_port

SHOW = (
    "import json, os, sys\n"
    "names = sys.argv[-1].split(',')\n"
    "open(f'got-{os.environ[\"RANK\"]}', 'w').write(json.dumps([sys.argv[1:-1], [os.environ.get(n) for n in names]]))\n"
)


@pytest.fixture(autouse=True)
def installed(distlaunch):
    distlaunch.pretend("deepspeed")


@pytest.fixture
def show(distlaunch):
    """Return a command that has each worker file its arguments and some of its variables; and what
    they filed."""
    script = distlaunch.work / "show.py"
    script.write_text(SHOW)

    def run(*words, names="LOCAL_RANK", env=None):
        result = distlaunch.run(["deepspeed", "--python", sys.executable, *words, names], env=env)
        assert result.returncode == 0, result.stderr
        files = sorted(distlaunch.work.glob("got-*"))
        got = [json.loads(file.read_text()) for file in files]
        for file in files:
            file.unlink()
        return got, result

    return run


def refused(distlaunch, *words, env=None):
    result = distlaunch.run(["deepspeed", *words], env=env)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    return result.stderr


def test_workers_get_their_local_rank_before_the_scripts_own_arguments(show):
    got, _ = show("--num_gpus", "2", "show.py", "sub", "--lr=1")
    assert got == [
        [["--local_rank=0", "sub", "--lr=1"], ["0"]],
        [["--local_rank=1", "sub", "--lr=1"], ["1"]],
    ]
    got, _ = show("--num_gpus", "2", "--no_local_rank", "show.py", "sub")
    assert got == [[["sub"], ["0"]], [["sub"], ["1"]]]


def test_a_script_that_knows_no_local_rank_is_given_a_hint_how_to_do_without_and_only_where_it_was_added(
    distlaunch,
):
    (distlaunch.work / "strict.py").write_text(
        "import argparse\nargparse.ArgumentParser().parse_args()\n"
    )
    off = "--no_local_rank leaves it out: LOCAL_RANK in the environment says the same"
    result = distlaunch.run(["deepspeed", "--num_gpus", "2", "strict.py"])
    assert result.returncode == 2
    assert off in " ".join(result.stderr.split())
    result = distlaunch.run(
        ["deepspeed", "--num_gpus", "2", "--no_local_rank", "strict.py", "--local_rank=0"]
    )
    assert result.returncode == 2
    assert "--no_local_rank" not in result.stderr


def test_the_slots_of_its_host_file_and_its_filters_are_the_workers(show, distlaunch):
    (distlaunch.work / "hosts").write_text("# one\nlocalhost slots=3\n")
    assert len(show("-H", "hosts", "show.py")[0]) == 3
    assert len(show("-H", "hosts", "-i", "localhost:0,2", "show.py")[0]) == 2
    assert len(show("-H", "hosts", "--exclude=localhost:1,2", "show.py")[0]) == 1
    assert (
        len(show("-H", "hosts", "--num_gpus", "2", "show.py", env={"DS_ACCELERATOR": "cpu"})[0])
        == 2
    )


def test_variables_of_its_file_reach_workers_below_env_and_the_file_stays_as_it_is(
    show, distlaunch
):
    home, here = (
        distlaunch.work.parent / "home" / ".deepspeed_env",
        distlaunch.work / ".deepspeed_env",
    )
    home.write_text("A=home\nB=home\nOMP_NUM_THREADS=3\n")
    here.write_text('B="x y=z"\nC=here\n')
    names = "A,B,C,OMP_NUM_THREADS"
    got, result = show("-x", "C=given", "show.py", names=names, env={"A": "inherited"})
    assert got[0][1] == ["home", "x y=z", "given", "3"]
    assert mentions(result.stderr, "variables", home)
    assert (home.read_text(), here.read_text()) == (
        "A=home\nB=home\nOMP_NUM_THREADS=3\n",
        'B="x y=z"\nC=here\n',
    )
    here.write_text("D=here\n")
    (distlaunch.work / "other").write_text("E=other\n")
    got, _ = show("show.py", names="A,D,E", env={"DS_ENV_FILE": "other"})
    assert got[0][1] == [None, None, "other"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nFOO\n", ":2: expected NAME=VALUE, found 'FOO'"),
        ("\nRANK=1\n", ":2: RANK is set by distlaunch for each worker"),
        ("#" * (5 << 20), ": it has more than 4 MiB"),
    ],
    ids=["no value", "ours", "too big"],
)
def test_a_contradiction_in_its_file_is_named(distlaunch, text, message):
    (distlaunch.work / ".deepspeed_env").write_text(text)
    shown_here = refused(distlaunch, "--python", sys.executable, "show.py")
    assert f"{distlaunch.work / '.deepspeed_env'}{message}" in shown_here
    assert "--env-file" not in shown_here


def test_save_pid_files_the_process_to_signal_and_takes_the_file_away(distlaunch):
    script = distlaunch.work / "look.py"
    script.write_text(
        "import os\n"
        "here = [name for name in os.listdir('/tmp') if name.endswith('.deepspeed')]\n"
        "print('pids', *(open('/tmp/' + name).read() for name in here))\n"
    )
    running = distlaunch.start(
        ["deepspeed", "--save_pid", "--num_gpus", "1", "--python", sys.executable, "look.py"]
    )
    result = running.wait()
    assert result.returncode == 0, result.stderr
    assert str(running.pid) in result.stdout.partition("pids ")[2].split()
    assert not os.path.exists(f"/tmp/{running.pid}.deepspeed")


def test_each_ranks_log_is_in_the_folder_that_is_named_and_not_on_the_console(distlaunch):
    (distlaunch.work / "talk.py").write_text("print('a word')\n")
    words = [
        "--enable_each_rank_log",
        "logs",
        "--num_gpus",
        "2",
        "--python",
        sys.executable,
        "talk.py",
    ]
    result = distlaunch.run(["deepspeed", *words])
    assert (result.returncode, result.stdout) == (0, "")
    logs = sorted((distlaunch.work / "logs").glob("*/attempt-0/rank-*.log"))
    assert [log.read_text() for log in logs if "latest" not in log.parts] == ["a word\n"] * 2


def test_without_ssh_a_launcher_on_each_node_of_the_host_file_makes_one_job(distlaunch):
    (distlaunch.work / "show.py").write_text(SHOW)
    (distlaunch.work / "hosts").write_text("n0 slots=2\nn1 slots=1\n")
    port = free_port()
    where = ["-H", "hosts", "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", str(port)]
    more = [
        "--python",
        sys.executable,
        "show.py",
        "RANK,LOCAL_RANK,WORLD_SIZE,LOCAL_SIZE,CROSS_RANK,CROSS_SIZE",
    ]
    launchers = []
    for rank in (1, 0):
        file = distlaunch.work / str(rank) / "ds.json"  # whose path may be another on each node
        file.parent.mkdir()
        file.write_text("{}")
        own = ["--node_rank", str(rank), "-o", f"config={file}", "-o", "pass-config=deepspeed"]
        launchers.append(distlaunch.start(["deepspeed", *where, *own, *more]))
    for launcher in launchers:
        result = launcher.wait()
        assert result.returncode == 0, result.stderr
    got = [json.loads((distlaunch.work / f"got-{rank}").read_text()) for rank in range(3)]
    places = [
        ["0", "0", "3", "2", "0", "2"],
        ["1", "1", "3", "2", "0", "2"],
        ["2", "0", "3", "1", "1", "2"],
    ]
    assert [place for _, place in got] == places
    assert got[2][0] == [
        f"--deepspeed_config={distlaunch.work / '1' / 'ds.json'}",
        "--local_rank=0",
    ]


def test_a_host_file_that_is_named_has_to_be_there(distlaunch):
    assert mentions(
        refused(distlaunch, "-H", "none", "show.py"),
        "--hostfile 'none'",
        "No such file or directory",
    )


def test_the_framework_has_to_be_there_and_the_command_that_brings_it_is_reported(distlaunch):
    (distlaunch.work / "show.py").write_text(SHOW)
    message = refused(distlaunch, "show.py", env={"PYTHONPATH": ""})
    assert mentions(message, "module deepspeed")
    assert "-m pip install 'deepspeed>=0.10'" in message


def test_workers_are_forked_where_their_words_are_the_same(distlaunch):
    (distlaunch.work / "show.py").write_text(
        "import sys\nprint(sys.argv[1:], 'colorsys' in sys.modules)\n"
    )
    (distlaunch.work / "ds.json").write_text("{}")
    words = [
        "--setup",
        ":",
        "--preload",
        "colorsys",
        "-o",
        "config=ds.json",
        "-o",
        "pass-config=deepspeed",
    ]
    result = distlaunch.run(
        ["deepspeed", "--num_gpus", "2", "--no_local_rank", *words, "show.py", "sub"]
    )
    assert result.returncode == 0, result.stderr
    assert result.lines_of(1) == [
        f"['--deepspeed_config={distlaunch.work / 'ds.json'}', 'sub'] True"
    ]
    message = refused(distlaunch, *words, "show.py")
    assert mentions(message, "--preload", "--local_rank", "exclude")
    assert mentions(message, "hint", "--no_local_rank", "LOCAL_RANK")


def test_help_is_that_of_a_command_of_ours(distlaunch):
    result = distlaunch.run(["deepspeed", "--help"], env={"COLUMNS": "200"})
    assert result.returncode == 0
    for flag in ("--num-gpus", "--hostfile", "--no-local-rank", "--max-restarts"):
        assert flag in result.stdout


def test_a_link_of_its_name_stands_for_the_command(distlaunch, tmp_path):
    link = tmp_path / "deepspeed"
    link.write_text(
        f"#!{sys.executable}\nimport sys\nfrom distlaunch.__main__ import main\nsys.argv[0] = {str(link)!r}\nmain()\n"
    )
    link.chmod(0o755)
    done = subprocess.run(
        [link, "--autotuning", "tune", "x.py"], env=distlaunch.env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--autotuning" in done.stderr


BUFFER = (
    "import os, pathlib, sys\n"
    "ends = [str(os.getuid()), *(os.environ[name] for name in ('MASTER_ADDR', 'MASTER_PORT', 'RANK'))]\n"
    "ends = ends[:-1] if sys.argv[1:] == ['old'] else ends\n"
    "noted = pathlib.Path('buffers')\n"
    "before = noted.read_text().splitlines() if noted.exists() else []\n"
    "left = [path for path in before if os.path.exists(path)]\n"
    "buffer = pathlib.Path('/dev/shm', 'deepspeed_allreduce_buffer_' + '_'.join(ends))\n"
    "noted.write_text('\\n'.join([*before, str(buffer)]))\n"
    "buffer.touch()\n"
    "sys.exit('left: ' + ' '.join(left) if left else 0 if before else 'once more')\n"
)
"""Makes a file as DeepSpeed names it (csrc/cpu/comm); fails at first, and where it finds that of
before."""


@pytest.mark.parametrize("words", [(), ("old",)], ids=["one each", "one for all"])
def test_the_buffers_of_its_collectives_on_cpus_are_gone_after_every_attempt(distlaunch, words):
    (distlaunch.work / "buffer.py").write_text(BUFFER)
    result = distlaunch.train(
        "--backend",
        "deepspeed",
        "--num-procs",
        "1",
        "--python",
        sys.executable,
        "--max-restarts",
        "1",
        "buffer.py",
        *words,
    )
    buffers = [Path(line) for line in (distlaunch.work / "buffers").read_text().splitlines()]
    left = [path for path in buffers if path.exists()]
    for path in left:
        path.unlink()
    assert result.returncode == 0, result.stderr
    assert len(buffers) == 2
    assert not left
