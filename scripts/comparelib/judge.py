"""Find the differences between two observations, and judge them by a table: what is not in it is a
failure.

A rule is about the whole text of a difference, and about the command lines that may show it: the
same text in another case is not known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from comparelib.cases import CASES
from comparelib.observe import Seen

Verdict = Literal["better", "different"]
"""A difference that is worse is mended, not listed."""


class Rule(NamedTuple):
    """A known difference: a pattern of its whole text, what it is called in the report, the
    verdict, and why.

    A pattern by case holds for these alone, one pattern for all.
    """

    pattern: str | Mapping[str, str]
    title: str
    verdict: Verdict
    reason: str
    by_chance: bool = False
    """It shows now and then, with any command line."""

    def knows(self, difference: str, case: str) -> bool:
        """Return whether this difference is this rule's, in that case."""
        pattern = self.pattern if isinstance(self.pattern, str) else self.pattern.get(case)
        return pattern is not None and re.fullmatch(pattern, difference) is not None


_ONE_WORKER = (
    "script alone",
    "PET variable and option",
    "the script's short options",
    "dashes after the script",
    "two pairs of dashes after the script",
    "spaces and letters",
    "dollars",
    "stdin, one worker",
)
_PET = {
    case.name: "|".join(f"-{name}" for name in case.env if name.startswith("PET_"))
    for case in CASES
    if any(name.startswith("PET_") for name in case.env)
}
_OUR_VARIABLES = (
    r"ATTEMPT: [01]",
    r"BACKEND: pytorch-ddp",
    r"COOKIE: [0-9a-f]{16}",
    r"JOB_ID: (\(a unique id\)|[\w-]+_[0-9a-f]{8})",
    r"PROGRESS_FD: 100",
    r"RUN_DIR: \{here\}/[\w/.-]+",
)
_BESIDE = r"\.distlaunch-run|events\.jsonl|plan-0\.json|times-0\.index|latest"
_LOGS = r"files: \+attempt_0/{0}/std{1}\.log"

RULES: tuple[Rule, ...] = (
    Rule(
        {
            "one worker fails": r"exit code 1 -> 37",
            "one worker is killed": r"exit code 1 -> 137",
            "restarts used up": r"exit code 1 -> 6",
        },
        "exit code of a failed job",
        "better",
        "The worker's own code (128 + N for signal N), where torchrun exits with 1 whatever "
        "happened.",
    ),
    Rule(
        dict.fromkeys(("no such script", "no such number", "no GPU"), r"exit code 1 -> 2"),
        "exit code of a command that cannot start",
        "better",
        "2 with one line that says what is wrong, before anything is started.",
    ),
    Rule(
        {
            "beginnings of our names": r"exit code 2 -> 0",
            "rank maps of two digits": r"exit code 1 -> 0",
        },
        "a command line that torchrun refuses",
        "better",
        "Options of the script that look like the beginning of torchrun's, local ranks of two "
        "digits, values that PET_ "
        "variables may have, and beginnings of names that only differ in dash and underscore.",
    ),
    Rule(
        {
            "beginnings of our names": r"worker 0-0 only here",
            "rank maps of two digits": r"worker 0-[01] only here",
        },
        "workers that torchrun does not start",
        "better",
        "Follows from the lines that torchrun refuses.",
    ),
    Rule(
        {
            "beginnings of our names": r"std(out|err): \['\1 0'\] only here \(refused there\)",
            "rank maps of two digits": r"std(out|err): \['\1 0', '\1 1'\] only here \(refused "
            r"there\)",
        },
        "output of those",
        "better",
        "As above.",
    ),
    Rule(
        {
            "dollars": re.escape(
                "argv: ['probe.py', '$x', '0'] -> ['probe.py', '$$x', '$local_rank']"
            )
        },
        "dollars in the script's arguments",
        "better",
        "`$$` and `$local_rank` reach the script as they are; `${local_rank}` is the local rank, "
        "as under torchrun.",
    ),
    Rule(
        rf"\+NODE_RANK: 0|\+DISTLAUNCH_({'|'.join(_OUR_VARIABLES)})",
        "variables that torchrun does not set",
        "better",
        "NODE_RANK, which scripts written for other launchers read, and what a worker may know of "
        "its job.",
    ),
    Rule(
        r"\+PYTHONUNBUFFERED: 1",
        "PYTHONUNBUFFERED=1 in place of `python -u`",
        "better",
        "The same for the worker; processes that it starts do not keep lines back either. A value "
        "of yours is kept.",
    ),
    Rule(
        dict.fromkeys(_ONE_WORKER, r"\+PYTHONFAULTHANDLER: 1"),
        "PYTHONFAULTHANDLER=1 for a single worker",
        "better",
        "A crash of native code names the line of Python. A value of yours is kept.",
    ),
    Rule(
        r"\+CUDA_DEVICE_ORDER: PCI_BUS_ID",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "better",
        "Device numbers are then those of nvidia-smi. A value of yours is kept.",
    ),
    Rule(
        {case.name: r"~OMP_NUM_THREADS: 1 -> [1-9]\d*" for case in CASES}
        | dict.fromkeys(_ONE_WORKER, r"\+OMP_NUM_THREADS: [1-9]\d*"),
        "OMP_NUM_THREADS",
        "better",
        "The worker's share of the CPUs that it may really use, also for a single worker; torchrun "
        "sets 1, or leaves "
        "the threads of a single worker to what the whole machine has. A value of yours is kept.",
    ),
    Rule(
        r"-TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "better",
        "A message of torchrun to itself, which a torchrun within a worker would obey.",
    ),
    Rule(
        _PET,
        "PET_ variables",
        "better",
        "They are the launcher's options, and do not reach workers: a torchrun within a worker "
        "would take them.",
    ),
    Rule(
        r"~MASTER_ADDR: localhost -> 127\.0\.0\.1",
        "MASTER_ADDR where none is given",
        "better",
        "127.0.0.1 means the same address to all, whatever localhost resolves to.",
    ),
    Rule(
        r"~TORCHELASTIC_USE_AGENT_STORE: True -> False",
        "TORCHELASTIC_USE_AGENT_STORE",
        "different",
        "Rank 0 is the store's server, on a port that is held for it; under torchrun the launcher "
        "serves it, "
        "and has torch loaded for that. `env://` and `tcp://` work alike; but the store ends with "
        "rank 0, as under "
        "mpirun and srun: workers that still need it then should meet in a barrier before rank 0 "
        "ends.",
    ),
    Rule(
        {case.name: r"~TORCHELASTIC_RUN_ID: none -> \(a unique id\)" for case in CASES}
        | {"PET variables": r"~TORCHELASTIC_RUN_ID: \(a unique id\) -> pet"}
        | {"log folder alone": r"~TORCHELASTIC_RUN_ID: \(a unique id\) -> run1"},
        "TORCHELASTIC_RUN_ID",
        "better",
        "Kept as --rdzv-id has it, also with --standalone; without one it is unique, never `none`.",
    ),
    Rule(
        {"virtual local rank": r"-CUDA_VISIBLE_DEVICES"},
        "--virtual-local-rank without GPUs",
        "better",
        "LOCAL_RANK is 0 as there; CUDA_VISIBLE_DEVICES is not set to devices that do not exist.",
    ),
    Rule(
        {case.name: rf"files: \+({_BESIDE})" for case in CASES}
        | {
            "a restart": rf"files: \+({_BESIDE}|plan-1\.json|times-1\.index)",
            "a recorded error": rf"files: \+({_BESIDE}|report\.txt|report\.json)",
        },
        "events.jsonl, plan-<k>.json, times-<k>.index and the report beside the attempts, and a link to the latest job",
        "better",
        "What happened, what was run, and why it failed.",
    ),
    Rule(
        {
            "log folder alone": _LOGS.format("[01]", "(out|err)"),
            "a recorded error": _LOGS.format("[01]", "(out|err)"),
            "maps": _LOGS.format("1", "out"),
            "role": _LOGS.format("[01]", "err"),
        },
        "stdout.log and stderr.log without -r or -t",
        "better",
        "Every byte of every worker is filed, whether it is shown or not.",
    ),
    Rule(
        {"log folder alone": r"files: (-\(id\)|\+run1)_\(random\)/"},
        "the name of the job's folder",
        "better",
        "It begins with --rdzv-id where there is one, also with --standalone.",
    ),
    Rule(
        dict.fromkeys(
            ("no python, local rank in the arguments", "run path"), r"unbuffered: False -> True"
        ),
        "output of programs and of --run-path",
        "better",
        "Python that a program starts, and a script under --run-path, keep no lines back, like any "
        "other script.",
    ),
    Rule(
        r"~TORCHELASTIC_ERROR_FILE: (logs/.*/error\.json) -> \{here\}/\1",
        "TORCHELASTIC_ERROR_FILE under a relative --log-dir",
        "better",
        "The path is absolute, and stays right when the script changes its directory.",
    ),
    Rule(
        r"std(out|err): \[.*\] torn there",
        "lines of two workers in one",
        "better",
        "Lines without a prefix are not torn by another worker's either. (Seen now and then, with "
        "any command line.)",
        by_chance=True,
    ),
)


def differences(there: Seen, here: Seen) -> Iterator[str]:
    """Return each difference once, as a text: what torchrun did, then what distlaunch did."""
    if there.exit_code != here.exit_code:
        yield f"exit code {there.exit_code} -> {here.exit_code}"
    refused = not there.workers and bool(here.workers or here.stdout)
    for name in sorted(there.workers.keys() | here.workers.keys()):
        if name not in here.workers:
            yield f"worker {name} only under torchrun"
        elif name not in there.workers:
            yield f"worker {name} only here"
        else:
            yield from _of_worker(there.workers[name], here.workers[name])
    for stream, before, after in (
        ("stdout", there.stdout, here.stdout),
        ("stderr", there.stderr, here.stderr),
    ):
        if before != after:
            if refused and not before:
                yield f"{stream}: {_few(after)} only here (refused there)"
            elif Counter("".join((before - after).elements())) == Counter(
                "".join((after - before).elements())
            ):
                yield f"{stream}: {_few(before - after)} torn there"
            else:
                yield (
                    f"{stream}: only there {_few(before - after)}, only here {_few(after - before)}"
                )
    for name in sorted(there.files.keys() | here.files.keys()):
        if name not in there.files:
            yield f"files: +{name}"
        elif name not in here.files:
            yield f"files: -{name}"
        elif there.files[name] != here.files[name]:
            yield f"files: {name} has {here.files[name]!r}, not {there.files[name]!r}"


def _of_worker(there: dict[str, object], here: dict[str, object]) -> Iterator[str]:
    for name in ("argv", "name", "cwd", "stdin", "unbuffered", "affinity"):
        if there[name] != here[name]:
            yield f"{name}: {there[name]} -> {here[name]}"
    before, after = there["env"], here["env"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            yield f"+{name}: {after[name]}"
        elif name not in after:
            yield f"-{name}"
        elif before[name] != after[name]:
            yield f"~{name}: {before[name]} -> {after[name]}"


def _few(lines: Counter[str]) -> str:
    return str(sorted(lines.elements())[:6])


def judge(difference: str, case: str) -> Rule | None:
    """Find the rule of a difference that this command line showed; None if it is not known."""
    return next((rule for rule in RULES if rule.knows(difference, case)), None)
