"""The kinds of system that scripts/testbed brings up: what each is called, what it can be told, how
it starts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from testbedlib import hosts, sandbox, slurm
from testbedlib.layout import Wanted

Options = argparse.Namespace


def _none(options: Options) -> Sequence[str]:
    del options
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of system."""

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    words: Callable[[Options], Sequence[str]]
    """Writes options down again, for the keeper's command line."""
    bring_up: Callable[[str, Options], Mapping[str, str]]
    hierarchies: Callable[[Options], Sequence[str]] = _none
    enter: sandbox.Enter = sandbox.enter_words


# --- slurm -----------------------------------------------------------------------------------------------------------


def _slurm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tracker",
        choices=slurm.TRACKERS,
        default=slurm.TRACKERS[0],
        help="how Slurm finds a step's processes",
    )


SLURM = Kind(
    name="slurm",
    summary="Slurm: slurmctld and four nodes",
    add_options=_slurm_options,
    words=lambda options: ["--tracker", options.tracker],
    bring_up=lambda directory, options: slurm.bring_up(directory, options.tracker),
    hierarchies=lambda options: slurm.hierarchies(options.tracker),
)


# --- hosts -----------------------------------------------------------------------------------------------------------


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


_FLAGS = {
    "ipv6_only": "no IPv4 in the networks",
    "jump": "the head reaches the first host only, and that one the others (ProxyJump)",
    "no_names": "hosts know no names but their own; ssh_config has addresses",
    "docker": "every host has docker0, all with the same address",
    "own_tmp": "every host has a /tmp of its own",
    "clocks_apart": "every host counts its monotonic time from another start",
}
_LISTS = {
    "names": "instead of n1, n2, …",
    "own_name_is_loopback": "hosts that take their own name for 127.0.1.1, as on Debian",
    "clocks": "n1=2.5 lets n1's time of day be 2.5 s ahead for what runs there by SSH",
}


def _hosts_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "count", nargs="?", type=int, default=4, metavar="N", help="hosts beside the head (4)"
    )
    parser.add_argument(
        "--networks", type=int, default=1, metavar="K", help="networks that every host is in (1)"
    )
    parser.add_argument(
        "--disk-mb", type=int, default=16, metavar="MB", help="size of each host's DIR/local (16)"
    )
    for name, what in _FLAGS.items():
        parser.add_argument(_word(name), action="store_true", help=what)
    for name, what in _LISTS.items():
        parser.add_argument(_word(name), type=_list, default=(), metavar="A,B", help=what)


def _word(name: str) -> str:
    return "--" + name.replace("_", "-")


def _hosts_words(options: Options) -> list[str]:
    words = [str(options.count), f"--networks={options.networks}", f"--disk-mb={options.disk_mb}"]
    words += [_word(name) for name in _FLAGS if getattr(options, name)]
    return words + [
        f"{_word(name)}={','.join(getattr(options, name))}"
        for name in _LISTS
        if getattr(options, name)
    ]


def _wanted(options: Options) -> Wanted:
    names = ("count", "networks", "disk_mb", *_FLAGS, *_LISTS)
    return Wanted(**{name: getattr(options, name) for name in names})


HOSTS = Kind(
    name="hosts",
    summary="several hosts with a network and an sshd each",
    add_options=_hosts_options,
    words=_hosts_words,
    bring_up=lambda directory, options: hosts.bring_up(directory, _wanted(options)),
    enter=hosts.enter_words,
)
KINDS = {kind.name: kind for kind in (SLURM, HOSTS)}
