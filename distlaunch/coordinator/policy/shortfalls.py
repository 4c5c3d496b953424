"""Why a node cannot take part, where it is not its transport that says so. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distlaunch.coordinator.policy.events_and_actions import Action, Say
from distlaunch.coordinator.policy.job_settings import Gathering
from distlaunch.coordinator.policy.membership import Member, shown
from distlaunch.core.model.host_list import fold_hosts, name_hosts
from distlaunch.core.model.ids import format_ranks
from distlaunch.core.model.text import counted
from distlaunch.core.protocol.remote import Survey, Surveyed
from distlaunch.transport.failures import STARTUP_HINT, ConnectFailure, Step
from distlaunch.transport.unreachable import render

_LONGEST_HOSTS = 400
"""Characters of a list of hosts in a hint."""


_LOOKS_LIKE_HOST = re.compile(r"[\w.-]+:\d+(?:,[\w.,:-]*)?")


def flaw(host: str, question: Survey, answer: Surveyed) -> ConnectFailure | None:
    """Find what keeps workers from running on a node that has been reached."""
    if not answer.cpus.allowed:
        return ConnectFailure(host=host, step="agent", text="it names no CPU that it may use", passing=False)
    no_python = bool(question.pythons) and not question.program and answer.python is None
    no_script = bool(question.script) and answer.script_sha256 is None
    if answer.problem is None and not no_python and not no_script:
        return None
    step: Step = "python" if no_python else "script" if no_script else "directory"
    if answer.problem is not None:
        text, hint = shown(answer.problem), answer.hint
        if "directory" in text and question.workdir in text:  # it is looked for first, and nothing else then
            step = "directory"
    elif no_python:
        text = f"none of the workers' interpreters is there: {', '.join(question.pythons)}"
        hint = "--python names one"
    else:
        text = f"there is no {question.script} (working directory: {question.workdir})"
        hint = "is the name right? copy it there, or keep it on a file system that all nodes share; --workdir names the"
        hint += " directory"
        if _LOOKS_LIKE_HOST.fullmatch(question.script):
            hint = f"if {question.script} is a host: commas, and no spaces, separate hosts"
    return ConnectFailure(host=host, step=step, text=text, hint=hint, passing=False)


def same_machine(members: Sequence[Member]) -> tuple[Member, Member] | None:
    """Return the first two of these nodes that are one machine; None if all are machines of their own."""
    by_machine: dict[str, Member] = {}
    for member in members:
        machine = "" if member.surveyed is None else member.surveyed.machine
        first = by_machine.setdefault(machine, member) if machine else member
        if first is not member:
            return first, member
    return None


def why_not(member: Member, *, waited_s: float, calls: bool = False) -> ConnectFailure:
    """Say why a node does not take part in an attempt that is not to be, for want of nodes.

    ``calls``: it has a launcher of its own, which calls us.
    """
    if member.failure is not None:
        return member.failure
    if member.why_lost is not None:
        return ConnectFailure(host=member.host, step="connect", text=f"lost ({member.why_lost}), and not back")
    if member.logged_in:
        text = f"logged in, but the agent has not started within {waited_s:g} s"
        return ConnectFailure(host=member.host, step="agent", text=text, hint=STARTUP_HINT)
    if member.state == "joined":
        return ConnectFailure(host=member.host, step="agent", text=f"no answer to the survey within {waited_s:g} s")
    if calls:
        return ConnectFailure(host=member.host, step="call", text=f"its launcher has not called within {waited_s:g} s")
    return ConnectFailure(host=member.host, step="connect", text=f"not reached within {waited_s:g} s")


def too_few(settings: Gathering, inside: Sequence[Member], missing: Sequence[Member], *, present: int) -> str:
    """Say that there is no attempt for want of nodes: who is missing, and why, each in a row."""
    if settings.flexible:
        there = "is" if len(inside) == 1 else "are"
        few = f"{len(inside)} of at least {counted(settings.bounds[0], 'node')} {there} there"
    else:
        few = f"{len(missing)} of {counted(present, 'node')} cannot be used"
    if settings.launchers and inside:
        few += f"; there: {_launchers(inside)}"
    failures = [why_not(member, waited_s=settings.join_timeout_s, calls=settings.launchers) for member in missing]
    alone = f"\n  hint: {settings.alone}" if settings.alone and not settings.flexible else ""
    instead = without(failures) if inside and not settings.flexible and not settings.launchers else ""
    return f"error: {few}\n{render(failures)}".rstrip() + instead + alone


def _launchers(members: Sequence[Member]) -> str:
    """Name launchers by their hosts; by their numbers as well if several are on one."""
    hosts = dict.fromkeys(member.host for member in members)
    if len(hosts) == len(members):
        return name_hosts(hosts)
    return f"launchers {format_ranks(member.number for member in members)} on {name_hosts(hosts)}"


def waiting(
    missing: Sequence[Member],
    *,
    here: int,
    present: int,
    within_s: float | None,
    left: str | None,
    launchers: bool = False,
) -> list[Action]:
    """Say who is waited for, and why they are not here, as far as that is known; ``left``: who has left just now.

    ``launchers``: those that are here wait as well, and are to hear of it, as of all that warns.
    """
    text = f"{here} of {counted(present, 'node')} {'is' if here == 1 else 'are'} here; waiting "
    text += "" if within_s is None else f"up to {within_s:.0f} s more "
    text += f"for {name_hosts(member.host for member in missing)}"
    failure = next((member.failure for member in missing if member.failure is not None), None)
    started = next((member for member in missing if member.logged_in), None)
    if failure is None and started is not None:
        text += f" ({started.host}: logged in, the agent has not started)"
    text += f" ({failure.host}: {failure.step}: {shown(failure.text)})" if failure is not None else ""
    text = f"{left}; {text}" if left else text
    return [Say(text=text, level="warning" if left or launchers else "info")]


def without(failures: Sequence[ConnectFailure]) -> str:
    """Say how a job goes on without hosts that cannot be reached, where others can."""
    if not all(failure.step in ("resolve", "connect", "login", "host key") for failure in failures):
        return ""
    hosts, more = _listed([*dict.fromkeys(failure.host for failure in failures)])
    others = f" and {more} more of them" if more else ""
    return (
        f"\n  hint: --exclude {hosts}{others} goes on without;"
        " with --num-nodes MIN:MAX a job takes those that are there"
    )


def _listed(hosts: Sequence[str]) -> tuple[str, int]:
    """Write hosts as one word of a command line, folded; return with it how many did not fit."""
    names = [f"[{host}]" if ":" in host else host for host in hosts]
    count = len(names)
    while len(text := fold_hosts(names[:count])) > _LONGEST_HOSTS and count > 1:
        count = count * 3 // 4
    return (f"'{text}'" if "[" in text else text), len(names) - count
