"""Score a folder of programs that fail or hang: rank, cause, hint, and what misleads.

The header of a program says what a good engineer would name after reading everything:

    # workers: 3                  number of workers; 4 by default
    # hang-timeout: 8             the program hangs; seconds for --hang-timeout
    # expect-rank: 2              or 0,3 or all: the report names one or more of these, and no other
    # expect-exit: 1              exit codes of the launcher, separated by commas
    # expect-cause: A | B         A or B is in the report; each of several such lines must hold
    # expect-frame: step | train  a function that the report names
    # expect-hint: disk | space   a word of the hint, in upper or lower case
    # misleads: Connection reset  text that must not be in the headline or the hint

The rank is that of the headline, or of the record in the events if the headline says "all". Lines
that the report gives to ranks that are not to blame do not count for the cause. A report misleads
if it names a rank that is not to blame, or if its headline or hint has a text that misleads.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

LIMIT_S = 90.0
HEADLINE = re.compile(r"ranks? (\d[\d,-]*)")
OTHERS = re.compile(r"^  ranks? ([\d, -]+): ")
FIRST_FAILURE = "Root Cause (first observed failure):"


@dataclass(frozen=True)
class Program:
    """One program of a corpus and its header."""

    path: Path
    header: dict[str, list[str]]

    @property
    def name(self) -> str:
        """The name within its folder; hanging programs have their folder before it."""
        folder = self.path.parent.name
        return f"{folder}/{self.path.stem}" if self.hangs else self.path.stem

    @property
    def workers(self) -> int:
        """Number of workers."""
        return int(self.header.get("workers", ["4"])[0])

    @property
    def hangs(self) -> bool:
        """Whether it hangs instead of failing."""
        return "hang-timeout" in self.header

    @property
    def blamed(self) -> set[int]:
        """Ranks that are to blame."""
        rank = self.header["expect-rank"][0]
        return (
            set(range(self.workers)) if rank == "all" else {int(part) for part in rank.split(",")}
        )


@dataclass
class Score:
    """How well one report explains one program; None where the header expects nothing."""

    rank: bool = False
    cause: bool = False
    frame: bool | None = None
    hint: bool | None = None
    exit: bool | None = None
    misled: bool = False
    missed: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    seconds: float = 0.0
    report: str = ""
    hint_text: str | None = None
    torchrun: dict[str, object] | None = None

    @property
    def both(self) -> bool:
        """Whether rank and cause are right."""
        return self.rank and self.cause


def read_programs(folder: Path) -> list[Program]:
    """Read the programs of a folder and of the folders in it."""
    return [
        Program(path, _header(path)) for path in sorted(folder.rglob("[!_]*.py")) if _header(path)
    ]


def _header(path: Path) -> dict[str, list[str]]:
    header: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        name, _, value = line.removeprefix("# ").partition(": ")
        header.setdefault(name, []).append(value.strip())
    return header


def _has(text: str, wanted: str, *, fold: bool = False) -> bool:
    text = " ".join(text.split())  # reports wrap long lines
    if fold:
        text, wanted = text.lower(), wanted.lower()
    return any(part in text for part in wanted.split(" | "))


def _numbers(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def _without_others(report: str, blamed: set[int]) -> str:
    kept = []
    for line in report.splitlines():
        others = OTHERS.match(line)
        if others and not _numbers(others[1]) & blamed:
            continue
        if not line.lstrip().startswith(("log:", "job ", "stacks and logs:")):
            kept.append(line)
    return "\n".join(kept)


def judge(program: Program, record: dict[str, object], report: str, exit_code: int) -> Score:
    """Compare a report and its record in the events with the header of the program."""
    expected, missed = program.header, list[str]()
    named = set(_ranks(record, "behind") or _ranks(record, "ended") or _ranks(record, "ranks"))
    headline = HEADLINE.match(report)
    if headline and not program.hangs:
        named = _numbers(headline[1])
    hint = record.get("hint")
    hint_text = None if hint is None else str(hint)
    score = Score(
        rank=bool(named) and named <= program.blamed,
        ranks=sorted(named),
        report=report,
        hint_text=hint_text,
        missed=missed,
    )
    if not score.rank:
        missed.append(f"rank: names {sorted(named)}, not {sorted(program.blamed)}")
    text = report if program.hangs else _without_others(report, program.blamed)
    text = text.replace(program.path.stem, "train")
    lacking = [want for want in expected["expect-cause"] if not _has(text, want)]
    score.cause = not lacking
    missed += [f"cause: lacks {want!r}" for want in lacking]
    if frames := expected.get("expect-frame"):
        score.frame = all(_has(text, want) for want in frames)
        missed += [] if score.frame else [f"frame: lacks {frames!r}"]
    if hints := expected.get("expect-hint"):
        score.hint = all(_has(hint_text or "", want, fold=True) for want in hints)
        missed += [] if score.hint else [f"hint: {hint_text!r} lacks {hints!r}"]
    if codes := expected.get("expect-exit"):
        allowed = {int(code) for code in codes[0].split(",")}
        # torch's gloo threads abort now and then while an interpreter ends after an exception.
        score.exit = exit_code in allowed or (exit_code == 134 and 1 in allowed)
        missed += [] if score.exit else [f"exit: {exit_code}, not {codes[0]}"]
    head = " ".join(
        str(record.get(name) or "") for name in ("summary", "exception_type", "message", "hint")
    )
    false = [want for want in expected.get("misleads", []) if want in head]
    score.misled = bool(false) or bool(named - program.blamed)
    missed += [f"misleads: {want!r} in the headline or hint" for want in false]
    return score


def _ranks(record: dict[str, object], name: str) -> list[int]:
    found = record.get(name)
    return [rank for rank in found if isinstance(rank, int)] if isinstance(found, list) else []


def _environment(scratch: Path) -> dict[str, str]:
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(scratch), "LANG": "C.UTF-8"}
    return env | {"XDG_STATE_HOME": str(scratch), "XDG_RUNTIME_DIR": str(scratch)}


def _run(command: list[str], scratch: Path) -> tuple[int | None, str, float]:
    """Run a command in a folder of its own; return exit code (None: out of time), stderr, time."""
    (scratch / "work").mkdir(parents=True)
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=scratch / "work",
        env=_environment(scratch),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    code: int | None
    try:
        errors = process.communicate(timeout=LIMIT_S)[1]
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        code = None
        try:
            errors = process.communicate(timeout=30)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            errors = process.communicate()[1]
    return code, errors.decode("utf-8", "replace"), time.monotonic() - began


def explain(program: Program) -> Score:
    """Run a program through ``distlaunch train`` and judge its report."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "distlaunch"
        command = [sys.executable, "-m", "distlaunch", "train", "--num-procs", str(program.workers)]
        command += ["--device", "cpu", "--log-dir", str(scratch / "logs"), "--job-id", "job"]
        if program.hangs:
            command += ["--hang-timeout", program.header["hang-timeout"][0]]
        code, errors, seconds = _run([*command, str(program.path)], scratch)
        try:
            lines = (scratch / "logs/job/events.jsonl").read_text("utf-8").splitlines()
            report = (scratch / "logs/job/report.txt").read_text("utf-8")
        except OSError as exc:
            return Score(missed=[f"{exc}; stderr: {errors[-500:]}"], seconds=seconds)
    events = [json.loads(line) for line in lines]
    records = [event["diagnosis"] for event in events if isinstance(event.get("diagnosis"), dict)]
    records = [event for event in events if event["type"] == "hang"] or records
    if not records or code is None:
        what = f"still ran after {LIMIT_S:g} s" if code is None else "no diagnosis in the events"
        return Score(missed=[what], seconds=seconds, report=report)
    score = judge(program, records[-1], report, code)
    score.seconds = round(seconds, 1)
    return score


def explain_by_torchrun(program: Program) -> dict[str, object]:
    """Run a program under torchrun; return whether its summary names the rank and the cause."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(program.workers), str(program.path)]
        _, errors, seconds = _run(command, Path(folder) / "torchrun")
    _, _, summary = errors.rpartition(FIRST_FAILURE)
    rank = re.search(r"^\s*rank\s*: (\d+)", summary, re.MULTILINE)
    named = [] if rank is None else [int(rank[1])]
    return {
        "rank": bool(named) and set(named) <= program.blamed,
        "cause": bool(summary)
        and all(_has(summary, want) for want in program.header["expect-cause"]),
        "ranks": named,
        "seconds": round(seconds, 1),
        "summary": summary.strip()[:800],
    }


def count(scores: dict[str, dict[str, object]]) -> dict[str, object]:
    """Count what is right in the scores of failing programs, or of hanging ones."""
    found: dict[str, object] = {"programs": len(scores)}
    for name in ("rank", "cause", "both", "misled"):
        found[name] = sum(bool(score[name]) for score in scores.values())
    for name in ("frame", "hint", "exit"):
        message = [score[name] for score in scores.values() if score[name] is not None]
        found[name] = f"{sum(map(bool, message))} of {len(message)}"
    beside = [score["torchrun"] for score in scores.values()]
    if measured := [score for score in beside if isinstance(score, dict)]:
        for name in ("rank", "cause"):
            right = sum(bool(score[name]) for score in measured)
            found[f"torchrun {name}"] = f"{right} of {len(measured)}"
    return found


def score_folder(
    folder: Path, names: list[str], *, torchrun: bool, written: Path | None
) -> dict[str, object]:
    """Score programs of a folder, print a line for each, and write the results as JSON."""
    programs = read_programs(folder.resolve())
    if unknown := sorted(set(names) - {program.name for program in programs}):
        sys.exit(f"no such program: {', '.join(unknown)}")
    root = Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(root), "log", "-1", "--format=%h", "--", "distlaunch"]
    revision = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    results: dict[str, object] = {"revision": revision, "date": time.strftime("%Y-%m-%d")}
    scores: dict[str, dict[str, object]] = {}
    print(f"{'program':32} rank  cause frame hint  misled  torchrun    seconds")
    for program in programs:
        if names and program.name not in names:
            continue
        score = explain(program)
        if torchrun and not program.hangs:
            score.torchrun = explain_by_torchrun(program)
        scores[program.name] = asdict(score) | {"both": score.both}
        words = [
            "-" if message is None else "yes" if message else "NO" for message in _columns(score)
        ]
        print(
            f"{program.name:32} {words[0]:5} {words[1]:5} {words[2]:5} {words[3]:5} "
            f"{'MISLED' if score.misled else '':7} {words[4] + '/' + words[5]:10} "
            f"{score.seconds:8.1f}  {'; '.join(score.missed)}".rstrip(),
            flush=True,
        )
        results["programs"] = scores
        results["failures"], results["hangs"] = _totals(scores)
        if written is not None:
            written.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    for name in ("failures", "hangs"):
        print(f"{name}: {json.dumps(results.get(name))}")
    return results


def _columns(score: Score) -> list[bool | None]:
    beside = score.torchrun or {}
    named = [None if name not in beside else bool(beside[name]) for name in ("rank", "cause")]
    return [score.rank, score.cause, score.frame, score.hint, *named]


def _totals(scores: dict[str, dict[str, object]]) -> tuple[dict[str, object], dict[str, object]]:
    hanging = {name: score for name, score in scores.items() if name.startswith("hangs/")}
    failing = {name: score for name, score in scores.items() if name not in hanging}
    return count(failing), count(hanging)


def merge(files: list[Path]) -> dict[str, object]:
    """Merge the results of several runs of one revision, without the texts of the reports."""
    found = [json.loads(path.read_text("utf-8")) for path in files]
    if len({part["revision"] for part in found}) != 1:
        sys.exit("the results are of different revisions")
    scores = {name: score for part in found for name, score in part["programs"].items()}
    scores = dict(sorted(scores.items()))
    for score in scores.values():
        score.pop("report")
        if score["torchrun"]:
            score["torchrun"].pop("summary")
    failing, hanging = _totals(scores)
    return found[-1] | {"programs": scores, "failures": failing, "hangs": hanging}
