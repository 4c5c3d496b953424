"""The options of the commands that look at jobs and stop them."""

from __future__ import annotations

from distlaunch.cli.option import Kind, Option


def _row(
    flags: str,
    kind: Kind,
    help: str,  # noqa: A002 - named as the field that it fills
    *,
    default: object = None,
    metavar: str = "",
    unset: str = "",
    choices: tuple[str, ...] = (),
    least_s: float = 0.0,
) -> Option:
    words = tuple(flags.split())
    return Option(
        flags=words,
        field=words[-1][2:].replace("-", "_"),
        kind=kind,
        default=default,
        help=help,
        group="output",
        variable=None,
        metavar="|".join(choices) or metavar,
        unset=unset,
        choices=choices,
        least_s=least_s,
    )


_LOG_DIR = _row(
    "--log-dir",
    "text",
    "Look for the job in this log directory only.",
    metavar="DIR",
    unset="all log directories that jobs of this user have had",
)
_FORMAT = _row(
    "--format",
    "choice",
    "Format of the output.",
    default="text",
    choices=("text", "json"),
)
_SINCE = "It counts back from now for a job that runs, and from the end of a job that has ended."
_FOLLOW = _row("-f --follow", "flag", "Continue until the job has ended.", default=False)

JOB_OPTIONS: dict[str, tuple[Option, ...]] = {
    "ps": (
        _row("-a --all", "flag", "List the jobs that have ended, too.", default=False),
        _LOG_DIR,
        _FORMAT,
    ),
    "status": (_LOG_DIR, _FORMAT),
    "logs": (
        _row(
            "--rank",
            "text",
            "Ranks whose output is printed.",
            metavar="0,4-7",
            unset="all ranks",
        ),
        _FOLLOW,
        _row(
            "-n --tail",
            "whole",
            "Print only the last lines.",
            metavar="N",
            unset="all lines; with --follow, those that come from now on",
        ),
        _row("--grep", "text", "Print only lines in which this is found.", metavar="REGEX"),
        _row(
            "--since",
            "seconds",
            f"Print only output of this last time. {_SINCE}",
            metavar="TIME",
        ),
        _row(
            "--attempt",
            "whole",
            "Print the output of this attempt.",
            metavar="K",
            unset="the newest attempt; with --follow, also those after it",
        ),
        _LOG_DIR,
        _FORMAT,
    ),
    "events": (
        _row(
            "--type",
            "text",
            "Print only events of these types. distlaunch help event-log lists them.",
            metavar="TYPE,...",
            unset="all types",
        ),
        _FOLLOW,
        _row(
            "-n --tail",
            "whole",
            "Print only the last events.",
            metavar="N",
            unset="all events",
        ),
        _row(
            "--since",
            "seconds",
            f"Print only events of this last time. {_SINCE}",
            metavar="TIME",
        ),
        _LOG_DIR,
        _FORMAT,
    ),
    "report": (
        _row(
            "--format",
            "choice",
            "Format of the report.",
            unset="as the suffix of --output says, else html",
            choices=("html", "md", "json"),
        ),
        _row(
            "-o --output",
            "text",
            "Write the report to this file; - is stdout.",
            metavar="FILE",
            unset="distlaunch-JOB.html for html, stdout for md and json",
        ),
        _LOG_DIR,
    ),
    "top": (
        _row(
            "--once",
            "flag",
            "Print the figures of all ranks once, and end. This is so without a terminal, too.",
            default=False,
        ),
        _row(
            "--interval",
            "seconds",
            "Time between two readings, at least 0.2 s.",
            least_s=0.2,
            default=2.0,
            metavar="TIME",
        ),
        _LOG_DIR,
        _FORMAT,
    ),
    "stack": (
        _row(
            "--rank", "text", "Ranks whose stacks are printed.", metavar="0,4-7", unset="all ranks"
        ),
        _row(
            "--native",
            "flag",
            "Print native frames, too, of one rank for each stack. Needs py-spy on the nodes.",
            default=False,
        ),
        _LOG_DIR,
        _FORMAT,
    ),
    "attach": (_LOG_DIR,),
    "wait": (_LOG_DIR,),
    "stop": (
        _row("--now", "flag", "Kill the workers without waiting for --grace.", default=False),
        _LOG_DIR,
    ),
    "rm": (_LOG_DIR,),
}
