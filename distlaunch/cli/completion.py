"""``distlaunch completion``: the completion script of a shell, and what the script asks for.

At each Tab the script runs ``distlaunch completion --words``, which answers from the option tables
of the installed version. Its first line is the kind of the candidates, a tab, and the part of the
word that stands before the value; then comes one candidate per line.

* ``--words bash LINE WORD``: the command line up to the cursor, and the word as bash delimits it.

* ``--words zsh WORD...`` and ``--words fish WORD...``: the words behind ``distlaunch``; the last
one is to be completed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Literal

from distlaunch.cli.commands.jobs_options import JOB_OPTIONS
from distlaunch.cli.completions import SHELLS, script_path
from distlaunch.cli.option import Option, Spelling
from distlaunch.cli.option_table import HELP_FLAGS, PLAN_OPTIONS, TRAIN_OPTIONS
from distlaunch.cli.parser import Given, HelpRequested, scan
from distlaunch.core.errors import LaunchError, UsageError
from distlaunch.core.model.record import Record
from distlaunch.core.model.text import quoted

Words = tuple[str, ...]

_ASKED = "--words"
_HERE = "\0"
"""Stands for the word to complete. No word of a command line contains this character."""
_METAVARS: dict[str, Literal["files", "directories"]] = {
    "FILE": "files",
    "PATH": "files",
    "DIR": "directories",
}
_TORCHRUN = ("torchrun", "torch.distributed.launch")
_DROP_INS = ("deepspeed", "horovodrun", "accelerate")


class Candidates(Record):
    """The possible completions of a word."""

    kind: Literal["words", "files", "directories"] = "words"
    """Files and directories are found by the shell itself."""
    prefix: str = ""
    """The beginning of the word, such as ``--backend=``."""
    rows: tuple[tuple[str, str], ...] = ()
    """Values and their descriptions, which may be empty."""


_NONE = Candidates()
_FILES = Candidates(kind="files")


def completion(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the completion script of a shell, or the answer to one (``--words``). Return 0. Raises
    UsageError."""
    if words[:1] == [_ASKED] and len(words) > 2:
        sys.stdout.write(_answer_script(words[1], words[2:], environ))
        return 0
    if len(words) != 1 or words[0] not in SHELLS:
        given = f", not {quoted(' '.join(words))}" if words else ""
        raise UsageError(
            f"completion takes one shell: {', '.join(SHELLS)}{given}",
            hint="distlaunch help install says how to install the script",
        )
    with open(script_path(words[0]), encoding="utf-8") as file:
        sys.stdout.write(file.read())
    return 0


def _answer_script(shell: str, words: Sequence[str], environ: Mapping[str, str]) -> str:
    if shell == "bash":
        line, word = words[0], words[-1]
        whole = split_line(line)[1:]
        found = complete(whole, environ)
        # bash ends words at ``=`` and ``:`` as well, and replaces only what is behind the last one.
        known = len(whole[-1]) - len(word)
        lines = [(found.prefix + value)[known:] for value, _ in found.rows]
    elif shell == "zsh":
        found = complete(words, environ)
        lines = [
            value.replace(":", r"\:") + (f":{text}" if text else "") for value, text in found.rows
        ]
    else:
        found = complete(words, environ)
        lines = [f"{found.prefix}{value}\t{text}".rstrip("\t") for value, text in found.rows]
    return "\n".join([f"{found.kind}\t{found.prefix}", *lines]) + "\n"


def split_line(line: str) -> list[str]:
    """Split a command line up to the cursor as a shell does. The last word may be empty, or have an
    open quote."""
    import shlex

    for closing in ("", "\\", "'", '"'):
        try:
            words = shlex.split(line + closing)
        except ValueError:  # an open quote, or a backslash at the end
            continue
        return [*words, ""] if line[-1:].isspace() and not closing else words or [""]
    return line.split(" ")


def complete(words: Sequence[str], environ: Mapping[str, str]) -> Candidates:
    """Return the candidates for the last of ``words``, which follow ``distlaunch`` on a command
    line."""
    *before, word = words
    match before:
        case []:
            if word.startswith("-"):
                return _matching_words(word, [(flag, "") for flag in ("--version", *HELP_FLAGS)])
            return _matching_words(word, _next_words(()))
        case ["completion"]:
            return _matching_words(word, [(shell, "") for shell in SHELLS])
        case ["help", *asked]:
            return _matching_words(word, _help_topics() if not asked else _next_words(tuple(asked)))
        case ["backends", *rest]:
            return _complete_backends(rest, word)
        case ["render" | "accelerate"]:
            return _matching_words(word, _next_words((before[0],)))
    if before[0] in JOB_OPTIONS and not word.startswith("-"):
        found = _complete_options((before[0],), JOB_OPTIONS[before[0]], before, word, environ)
        return (
            _complete_job(word, before, environ) if found == _FILES and before[0] != "ps" else found
        )
    command = tuple(before[:2] if before[0] in ("render", "accelerate") else before[:1])
    options = _options_of(command)
    return _NONE if not options else _complete_options(command, options, before, word, environ)


def _next_words(begun: Words) -> list[tuple[str, str]]:
    from distlaunch.cli.help import SUMMARIES

    place = len(begun)
    found: dict[str, str] = {}
    for path, text in SUMMARIES.items():
        if path[:place] == begun and len(path) > place:
            found.setdefault(path[place], text if len(path) == place + 1 else "")
    return [*found.items()]


def _complete_job(word: str, before: Sequence[str], environ: Mapping[str, str]) -> Candidates:
    if os.sep in word:
        return Candidates(kind="directories")
    from distlaunch.jobs.find import find_jobs
    from distlaunch.jobs.show import command

    asks = before[0] in ("attach", "wait", "stop")
    jobs = [job for job in find_jobs(None, environ) if not (asks and job.state.has_ended)]
    return _matching_words(word, [("latest", ""), *((job.name, command(job)) for job in jobs)])


def _help_topics() -> list[tuple[str, str]]:
    from distlaunch.cli.pages import topics

    return [*_next_words(()), *((topic, "") for topic in topics())]


def _options_of(command: Words) -> Sequence[Spelling]:
    if command == ("train",):
        return TRAIN_OPTIONS
    if command == ("plan",):
        return PLAN_OPTIONS
    if command[0] in _TORCHRUN:
        command = _TORCHRUN[:1]
    if command[0] in (*_TORCHRUN, *_DROP_INS):
        options: Sequence[Spelling] = import_module(
            f"distlaunch.cli.compat.{command[0]}.options"
        ).OPTIONS
        return options
    if command[0] in JOB_OPTIONS:
        return JOB_OPTIONS[command[0]]
    if command[0] == "render":
        from distlaunch.cli.commands.render import TARGETS, options_of

        return next((options_of(target) for target in TARGETS if command[1:] == (target,)), ())
    return ()


def _complete_options(
    command: Words,
    options: Sequence[Spelling],
    before: Sequence[str],
    word: str,
    environ: Mapping[str, str],
) -> Candidates:
    typed = before[len(command) :]
    flag, equals, value = word.partition("=")
    attached = word.startswith("--") and equals != ""
    try:
        given, rest = scan(
            [*typed, *((flag, _HERE) if attached else (_HERE,))],
            options,
            abbreviated=options if command[0] in (*_TORCHRUN, *_DROP_INS) else (),
        )
    except (LaunchError, HelpRequested):
        return _NONE
    option = next((each for each in options if _HERE in given.get(each.field, ())), None)
    if option is not None:
        if not attached:
            return _complete_value(command, option, word, given, environ)
        found = _complete_value(command, option, value, given, environ)
        return Candidates(kind=found.kind, prefix=f"{flag}=" + found.prefix, rows=found.rows)
    if attached:
        return _NONE
    if rest == (_HERE,) and typed[-1:] != ["--"] and word.startswith("-"):
        return _matching_words(word, _flag_rows(options, word))
    return _FILES


def _flag_rows(options: Iterable[Spelling], word: str) -> list[tuple[str, str]]:
    """Return all flags with their descriptions; with underscores if ``word`` has them."""
    found = []
    for option in options:
        if getattr(option, "group", "") in ("refused", "no effect"):
            continue
        for flag in option.all_flags:
            spelt = "--" + flag[2:].replace("-", "_") if "_" in word else flag
            found.append((spelt, _first_sentence(option)))
    return [*found, *((flag, "Print the help and exit.") for flag in HELP_FLAGS)]


def _first_sentence(option: Spelling) -> str:
    text = option.help if isinstance(option, Option) else getattr(option, "here", "")
    return str(text).partition(". ")[0].rstrip(".")


def _complete_value(
    command: Words, option: Spelling, value: str, given: Given, environ: Mapping[str, str]
) -> Candidates:
    choices: tuple[str, ...] = getattr(option, "choices", ())
    if choices:
        return _matching_words(value, [(choice, "") for choice in choices])
    if option.kind == "backend":
        return _matching_words(value, _backend_rows())
    if option.field == "opt":
        if "=" in value:
            return _NONE
        own = command[0] if command[0] in _DROP_INS else ""
        return _matching_words(value, _backend_options(given.get("backend", [own])[-1]))
    if option.field == "env" and option.repeatable:
        return _NONE if "=" in value else _matching_words(value, [(name, "") for name in environ])
    if option.field == "source":
        from distlaunch.planning.clusters.select import NAMES

        return _matching_words(value, [(name, "") for name in NAMES])
    if kind := _METAVARS.get(option.metavar):
        return Candidates(kind=kind)
    parts = option.metavar.split("|")
    if len(parts) == 1:
        return _NONE
    return _matching_words(value, [(part, "") for part in parts if _is_typed(part)])


def _is_typed(part: str) -> bool:
    """Return whether an alternative of a metavar is typed as it stands, like ``auto`` in
    ``N|auto``."""
    return part.replace("-", "").replace("_", "").isalnum() and part[0].islower() and part.islower()


def _backend_rows() -> list[tuple[str, str]]:
    from distlaunch.backends.registry import ENTRY_POINTS, backend_names

    names = dict.fromkeys([*backend_names(), *_entry_points(ENTRY_POINTS)])
    return [(name, "") for name in names]


def _entry_points(group: str) -> Iterator[str]:
    """Yield the names of entry points. Read the metadata ourselves: importing
    ``importlib.metadata`` takes longer than the whole completion."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or os.curdir)
        except OSError:
            continue
        for name in sorted(names):
            if not name.endswith((".dist-info", ".egg-info")):
                continue
            try:
                with open(os.path.join(folder, name, "entry_points.txt"), encoding="utf-8") as file:
                    text = file.read()
            except (OSError, UnicodeDecodeError):
                continue
            below = text.partition(f"[{group}]")[2].partition("\n[")[0]
            for line in below.splitlines():
                point, equals, _ = line.partition("=")
                if equals:
                    yield point.strip()


def _backend_options(name: str) -> list[tuple[str, str]]:
    from distlaunch.backends.base import BackendError
    from distlaunch.backends.registry import find_backend, spelled_backend

    name = {"horovodrun": "horovod"}.get(name, name)
    try:
        options = find_backend(spelled_backend(name)).options() if name else ()
    except BackendError:
        return []
    return [(f"{option.name}=", option.about.partition(". ")[0].rstrip(".")) for option in options]


def _complete_backends(typed: Sequence[str], word: str) -> Candidates:
    from distlaunch.cli.help import BACKENDS_FORMATS

    flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
    before, value = (flag, value) if equals else (typed[-1] if typed else "", word)
    prefix = f"{flag}=" if equals else ""
    if before == "--format":
        return _matching_words(value, [(each, "") for each in BACKENDS_FORMATS], prefix=prefix)
    if before == "--python":
        return Candidates(kind="files", prefix=prefix)
    if word.startswith("-"):
        return _matching_words(word, [(name, "") for name in ("--format", "--python", *HELP_FLAGS)])
    return _matching_words(word, _backend_rows())


def _matching_words(begun: str, rows: Iterable[tuple[str, str]], *, prefix: str = "") -> Candidates:
    return Candidates(prefix=prefix, rows=tuple(row for row in rows if row[0].startswith(begun)))
