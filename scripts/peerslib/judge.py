"""The differences from peers that are meant, each with its reason; any other is a fault."""

from __future__ import annotations

from typing import NamedTuple

from peerslib.cases import POOL, Case


class Rule(NamedTuple):
    """Inputs of one area that are answered differently on purpose."""

    area: str
    inputs: tuple[tuple[str, ...], ...]
    reason: str


def _rule(area: str, reason: str, *inputs: str | tuple[str, ...]) -> Rule:
    return Rule(area, tuple((each,) if isinstance(each, str) else each for each in inputs), reason)


RULES: tuple[Rule, ...] = (
    _rule(
        "deepspeed_hostfile",
        "One reader takes the host files of all launchers: a host may have no slots (its GPUs "
        "count) or `HOST:N`, "
        "blanks around `=` do no harm, and a host that is named again gets the slots of both "
        "lines, as under Open MPI.",
        "worker-1 slots=2\nworker-2 slots=1\nworker-1 slots=1\n",
        "missingslots\n",
        "worker-1 slots = 2\n",
        "worker-1:2\n",
    ),
    _rule(
        "deepspeed_hostfile",
        "A host with no slot could run nothing; leave its line out.",
        "worker-1 slots=0\n",
    ),
    _rule(
        "deepspeed_hostfile",
        "The name before `@` is the user of the SSH connection, not a part of the host's name.",
        "user@worker-1 slots=2\n",
    ),
    _rule(
        "deepspeed_filter",
        "A filter that leaves nothing is an error at once; DeepSpeed finds that out later.",
        ("worker-0:4", "", "worker-0"),
        ("worker-0:4", "", "worker-0:0,1,2,3"),
    ),
    _rule(
        "deepspeed_filter",
        "`train` takes `--include` and `--exclude` together: the second takes away from what the "
        "first has chosen. "
        "`distlaunch deepspeed` refuses both together, as DeepSpeed does.",
        (POOL, "worker-0", "worker-1"),
    ),
    _rule(
        "deepspeed_filter",
        "Parts of a filter add up: a node that is named whole is whole, whatever else names some "
        "of its slots.",
        (POOL, "worker-0@worker-0:1", ""),
    ),
    _rule(
        "deepspeed_filter",
        "Ranges of slots and blanks around a filter are taken.",
        (POOL, "worker-0:0-2", ""),
        (POOL, " worker-0:0 ", ""),
    ),
    _rule(
        "deepspeed_refuses",
        "DeepSpeed overlooks this contradiction on a single machine and starts on all devices.",
        "-i localhost:0 -e localhost:1",
    ),
    _rule(
        "deepspeed_refuses",
        "DeepSpeed starts on this machine alone when the host file that was named does not exist.",
        "--hostfile /nowhere/hostfile --num_nodes 2",
    ),
    _rule(
        "horovod_hosts",
        "Without slots a host has as many as it has GPUs.",
        "worker-0",
    ),
    _rule(
        "horovod_hosts",
        "A host that is named again gets the slots of both, in one node; Horovod counts two nodes "
        "of one name.",
        "a:1,a:1",
    ),
    _rule("horovod_hosts", "A host with no slot could run nothing; leave it out.", "a:0,b:2"),
    _rule(
        "horovod_hostfile",
        "Empty lines, comments and hosts without slots are taken; horovodrun ends with an "
        "IndexError.",
        "h1 slots=2\n\nh2 slots=2\n",
        "# hosts\nh1 slots=2\n",
        "h1\n",
    ),
    _rule(
        "horovod_settings",
        "The same number, written without `.0`.",
        "--fusion-threshold-mb 10 --cycle-time-ms 20 --cache-capacity 512",
        "--fusion-threshold-mb 256 --config-file {config} --cycle-time-ms 20",
    ),
    _rule(
        "horovod_settings",
        "`--no-autotune` also turns off what a variable has turned on; horovodrun ignores it.",
        "--no-autotune",
        "--config-file {config} --no-autotune",
    ),
    _rule(
        "horovod_settings",
        "`--gloo-timeout-seconds` is set; horovodrun 0.28.1 drops it.",
        "--mpi-threads-disable --num-nccl-streams 2 --thread-affinity 1 --gloo-timeout-seconds 60",
    ),
    _rule(
        "horovod_settings",
        "An empty configuration file sets nothing; horovodrun ends with an AttributeError.",
        "--config-file {empty}",
    ),
    _rule("slurm_nodelist", "A host that is named again is still one node.", "a1,a1,a2"),
    _rule("torchrun_std", "Local ranks may have two digits.", "10:3"),
)


def judge(case: Case) -> Rule | None:
    """Return the rule that explains why the answers to a case differ; None if there is none."""
    return next(
        (rule for rule in RULES if rule.area == case.area and case.input in rule.inputs), None
    )
