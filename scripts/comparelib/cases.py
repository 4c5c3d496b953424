"""The command lines that are compared: kinds that are published for torchrun, each run in a folder
of its own.

``{port}`` is a free port, ``{here}`` that folder. It has probe.py, pkg/train.py and "my app.zip",
all the probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Case(NamedTuple):
    """One command line; ``do`` is what the probe does."""

    name: str
    words: tuple[str, ...]
    env: Mapping[str, str] = {}
    do: str = ""
    stdin: str | None = None


def _case(
    name: str, line: str, *more: str, do: str = "", stdin: str | None = None, **env: str
) -> Case:
    return Case(name, (*line.split(), *more), env, do, stdin)


CASES: tuple[Case, ...] = (
    _case("script alone", "probe.py"),
    _case("standalone", "--standalone --nproc-per-node=2 probe.py --lr 0.1"),
    _case("underscores", "--standalone --nproc_per_node 2 probe.py"),
    _case("one node", "--nnodes=1 --nproc-per-node=2 probe.py conf.yaml"),
    _case("one node as a range", "--nnodes=1:1 --nproc-per-node=2 --max-restarts=0 probe.py"),
    _case(
        "c10d, port 0",
        "--nnodes=1 --nproc-per-node=2 --rdzv-id=job7 --rdzv-backend=c10d "
        "--rdzv-endpoint=localhost:0 probe.py",
    ),
    _case(
        "c10d, port given",
        "--nproc-per-node=2 --rdzv-id=8 --rdzv-backend=c10d --rdzv-endpoint=localhost:{port} "
        "probe.py",
    ),
    _case(
        "static, address and port",
        "--nnodes=1 --node-rank=0 --nproc-per-node=2 --master-addr=127.0.0.1 --master-port={port} "
        "probe.py",
    ),
    _case("master port alone", "--nproc_per_node=2 --master_port={port} probe.py"),
    _case(
        "static endpoint",
        "--rdzv-backend=static --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=9 --nproc-per-node=2 "
        "probe.py",
    ),
    _case("module", "--nproc-per-node=2 -m pkg.train --epochs 3"),
    _case("module, long", "--standalone --nproc-per-node 2 --module pkg.train"),
    _case(
        "no python, shell",
        "--nproc-per-node=2 --no-python bash -c",
        "echo out $LOCAL_RANK of $WORLD_SIZE",
    ),
    _case(
        "no python, local rank in the arguments",
        "--nproc-per-node=2 --no-python python probe.py --gpu ${local_rank}",
    ),
    _case("run path", "--nproc-per-node=2 --run-path {here}/probe.py a b"),
    _case("zip", "--nproc-per-node=2", "my app.zip", "x"),
    _case(
        "PET variables", "probe.py", PET_NPROC_PER_NODE="2", PET_STANDALONE="1", PET_RDZV_ID="pet"
    ),
    _case(
        "PET variables of an operator",
        "probe.py",
        PET_NNODES="1",
        PET_NPROC_PER_NODE="2",
        PET_NODE_RANK="0",
        PET_MASTER_ADDR="127.0.0.1",
        PET_MASTER_PORT="{port}",
    ),
    _case("PET variable and option", "--nproc-per-node=1 probe.py", PET_NPROC_PER_NODE="2"),
    _case("tee", "--nproc-per-node=2 --tee 3 --log-dir logs probe.py"),
    _case("redirects", "--nproc-per-node=2 -r 3 --log-dir logs probe.py"),
    _case("maps", "--nproc-per-node=2 -r 0:1,1:2 -t 0:2 --log-dir logs probe.py"),
    _case("log folder alone", "--nproc-per-node=2 --log_dir=logs --rdzv-id=run1 probe.py"),
    _case("ranks filtered", "--nproc-per-node=2 --local-ranks-filter=0 probe.py"),
    _case(
        "ranks filtered, tee",
        "--nproc-per-node=2 --local_ranks_filter 1 --tee 3 --log-dir logs probe.py",
    ),
    _case("role", "--nproc-per-node=2 --role trainer -t 1 --log-dir logs probe.py"),
    _case(
        "prefix",
        "--nproc-per-node=2 -t 3 --log-dir logs probe.py",
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name}/${rank}/${local_rank}> ",
    ),
    _case(
        "lines copied",
        "--nproc-per-node=2 -t 3 --duplicate-stdout-filters=out --log-dir logs probe.py",
    ),
    _case("virtual local rank", "--nproc-per-node=2 --virtual-local-rank probe.py"),
    _case(
        "a restart", "--nproc-per-node=2 --max-restarts=1 --log-dir logs -r 3 probe.py", do="first"
    ),
    _case("restarts used up", "--nproc-per-node=2 --max-restarts=1 probe.py", do="always"),
    _case("one worker fails", "--nproc-per-node=2 probe.py", do="exit"),
    _case("one worker raises", "--nproc-per-node=2 probe.py", do="raise"),
    _case("one worker is killed", "--nproc-per-node=2 probe.py", do="kill"),
    _case("a recorded error", "--nproc-per-node=2 --log-dir logs probe.py", do="record"),
    _case("no such script", "--nproc-per-node=2 nothing.py"),
    _case("no such number", "--nproc-per-node=two probe.py"),
    _case("no GPU", "--nproc-per-node=gpu probe.py"),
    _case("a misspelt option", "--nprocs-per-nodes=2 probe.py"),
    _case("no script", "--nproc-per-node=2"),
    _case(
        "the script's own options", "--nproc-per-node=2 probe.py --nnodes 9 --log-dir x -m --tee=3"
    ),
    _case("the script's short options", "probe.py -r 1 -t 2 -h"),
    _case("beginnings of our names", "probe.py --r=16 --no"),
    _case("dashes before the script", "--nproc-per-node=2 -- probe.py a -- b"),
    _case("dashes after the script", "probe.py -- a"),
    _case("two pairs of dashes after the script", "probe.py -- -- a"),
    _case("dashes among the script's arguments", "--nproc-per-node=2 probe.py a -- b"),
    _case("spaces and letters", "probe.py", "two words", "", "Übung ☃", "a=b c", "$HOME", "*"),
    _case("dollars", "probe.py", "$$x", "$local_rank"),
    _case(
        "variables",
        "--nproc-per-node=2 probe.py",
        OMP_NUM_THREADS="3",
        CUDA_VISIBLE_DEVICES="",
        FOO="a b",
    ),
    _case("rank maps of two digits", "--nproc-per-node=2 -r 12:3 probe.py"),
    _case("stdin, one worker", "probe.py", do="read", stdin="hello"),
    _case(
        "options without meaning",
        "--nproc-per-node=2 --monitor-interval 1 --start-method fork --event-log-handler null "
        "--rdzv-conf timeout=60 probe.py",
    ),
    _case("joined and begun names", "--nproc_p=2 --max-r 0 -mr1 pkg.train"),
    _case("every CPU", "--nproc-per-node=cpu --standalone probe.py"),
    _case("auto", "--nproc-per-node=auto --standalone probe.py"),
    _case(
        "signals and timeout",
        "--nproc-per-node=2 --signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 10 probe.py",
    ),
)
