"""Layer job: why a node cannot take part, where it is not its transport that says so. Pure."""

from __future__ import annotations

from distlaunch.core.wire.remote import Survey, Surveyed
from distlaunch.job.failures import ConnectFailure, Step
from distlaunch.job.membership import Member, shown


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
        hint = "copy it there, or keep it on a file system that all nodes share; --workdir names another directory"
    return ConnectFailure(host=host, step=step, text=text, hint=hint, passing=False)


def why_not(member: Member, *, waited_s: float, calls: bool = False) -> ConnectFailure:
    """Say why a node does not take part in an attempt that is not to be, for want of nodes.

    ``calls``: it has a launcher of its own, which calls us.
    """
    if member.failure is not None:
        return member.failure
    if member.why_lost is not None:
        return ConnectFailure(host=member.host, step="connect", text=f"lost ({member.why_lost}), and not back")
    if member.state == "joined":
        return ConnectFailure(host=member.host, step="agent", text=f"no answer to the survey within {waited_s:g} s")
    if calls:
        return ConnectFailure(host=member.host, step="call", text=f"its launcher has not called within {waited_s:g} s")
    return ConnectFailure(host=member.host, step="connect", text=f"not reached within {waited_s:g} s")
