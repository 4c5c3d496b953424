"""The answers of another launcher. Runs in the interpreter that has it: cases as JSON on stdin,
answers on stdout.

Calls the launcher's own functions, each of which decides what its command does with that input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

REFUSED = "refused"
_HOROVODS_OWN = ("HOROVOD_GLOO_TIMEOUT_SECONDS",)


def deepspeed_hostfile(text: str) -> Any:
    """Return the slots by host."""
    from deepspeed.launcher.runner import _parse_hostfile

    return dict(_parse_hostfile(text.splitlines()))


def deepspeed_filter(pool: str, include: str, exclude: str) -> Any:
    """Return the chosen slots by host."""
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    slots = {host: int(number) for host, number in (each.split(":") for each in pool.split(","))}
    return dict(parse_inclusion_exclusion(slots, include, exclude))


def deepspeed_refuses(words: str) -> Any:
    """Return whether the launcher goes on to start anything."""
    from deepspeed.launcher import runner

    class StartedError(Exception):
        pass

    def start(*_: object, **__: object) -> None:
        raise StartedError

    with patch.object(runner.subprocess, "Popen", start):
        try:
            runner.main([*words.split(), "train.py"])
        except StartedError:
            return "started"
    return "started"


def horovod_hosts(text: str) -> Any:
    """Return hosts and slots, in order."""
    from horovod.runner.common.util.hosts import parse_hosts, parse_hosts_and_slots

    parse_hosts_and_slots(text)  # horovodrun calls both
    return [[each.hostname, each.slots] for each in parse_hosts(text)]


def horovod_hostfile(text: str) -> Any:
    """Return hosts and slots, in order."""
    from horovod.runner.common.util.hosts import parse_host_files

    with open("hostfile", "w", encoding="utf-8") as file:
        file.write(text)
    return horovod_hosts(parse_host_files("hostfile"))


def horovod_assignments(hosts: str, number: str) -> Any:
    """Return host, rank, local rank, size, local size, cross rank and cross size of each worker."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

    found = get_host_assignments(parse_hosts(hosts), int(number), int(number))
    return [
        [
            each.hostname,
            each.rank,
            each.local_rank,
            each.size,
            each.local_size,
            each.cross_rank,
            each.cross_size,
        ]
        for each in found
    ]


def horovod_settings(words: str) -> Any:
    """Return the variables of Horovod that horovodrun sets for these options."""
    from horovod.runner.common.util import config_parser
    from horovod.runner.launch import parse_args

    with patch.object(
        sys, "argv", ["horovodrun", "-np", "1", *words.split(), "python", "train.py"]
    ):
        args = parse_args()
    env: dict[str, str] = {}
    config_parser.set_env_from_args(env, args)
    return {
        name: value for name, value in env.items() if name not in _HOROVODS_OWN or name in words
    }


def torchrun_nnodes(text: str) -> Any:
    """Return the smallest and the largest number of nodes."""
    from torch.distributed.run import parse_min_max_nnodes

    least, most = parse_min_max_nnodes(text)
    assert 0 < least <= most  # LaunchConfig's own assertion
    return "accepted"


def torchrun_rdzv_conf(text: str) -> Any:
    """Return whether torchrun takes the text."""
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    _parse_rendezvous_config(text)
    return "accepted"


def torchrun_rdzv_endpoint(text: str) -> Any:
    """Return whether torchrun takes the text."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    parse_rendezvous_endpoint(text, default_port=29400)
    return "accepted"


def torchrun_std(text: str) -> Any:
    """Return whether torchrun takes the text for --redirects."""
    from torch.distributed.elastic.multiprocessing.api import Std

    Std.from_str(text)
    return "accepted"


def accelerate_settings(words: str) -> Any:
    """Return the variables that ``accelerate launch`` sets for its library."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    args = launch.launch_command_parser().parse_args([*words.split(), "train.py"])
    nowhere = patch.object(launch, "default_config_file", "/nowhere/default_config.yaml")
    with patch.dict(os.environ, {}, clear=True), nowhere:
        args, defaults, _ = launch._validate_launch_command(args)  # noqa: SLF001 - it has no public name
        args.main_process_port = 0
        if args.use_deepspeed and not args.cpu:
            args.deepspeed_fields_from_accelerate_config = (
                ",".join(defaults.deepspeed_config) if defaults else ""
            )
            env = prepare.prepare_deepspeed_cmd_env(args)[1]
        elif (args.use_fsdp or args.multi_gpu) and not args.cpu:
            env = prepare.prepare_multi_gpu_env(args)
        else:
            env = prepare.prepare_simple_launcher_cmd_env(args)[1]
    env = {name: value for name, value in env.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
    if "ACCELERATE_USE_CPU" in env:
        env["ACCELERATE_USE_CPU"] = env[
            "ACCELERATE_USE_CPU"
        ].lower()  # both spellings are read alike
    return env


def main() -> None:
    """Answer each case: its answer, or that the peer refuses it (or fails on it) with a text."""
    answers = []
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a peer prints is no answer
    for area, arguments in json.load(sys.stdin):
        function: Callable[..., Any] = globals()[area]
        try:
            answers.append([function(*arguments), ""])
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - whatever it raises is its answer
            answers.append([REFUSED, f"{type(exc).__name__}: {exc}"])
    json.dump(answers, out)
    out.close()


if __name__ == "__main__":
    main()
