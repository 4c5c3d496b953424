"""Notice about options of distlaunch that stand after SCRIPT, where the script gets them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.text import printable
from distlaunch.planning.train_options import TrainOptions


def misplaced_options(
    options: TrainOptions, names: Iterable[str], environ: Mapping[str, str]
) -> list[str]:
    """Return one notice if arguments of the script look like options of distlaunch.

    Options whose name occurs in the text of the script are skipped. ``names`` are the long options
    of this command. Of several launchers, only RANK 0 returns a notice.
    """
    words = [word for word in options.script_args if word[:2] == "--" and len(word) > 2]
    if not words or options.quiet or environ.get("RANK", "0") != "0":
        return []
    ours = set(names)
    found = dict.fromkeys(
        flag for flag in (word.partition("=")[0] for word in words) if _with_dashes(flag) in ours
    )
    if not found:
        return []
    from distlaunch.launch.script_source import script_text

    try:
        text = script_text(options, os.getcwd())
    except FileNotFoundError:  # the current directory
        return []
    if text is None:
        return []
    unknown = [flag for flag in found if not any(name in text for name in _spellings(flag))]
    if not unknown:
        return []
    script = printable(os.path.basename(options.script or ""))
    went = (
        f"{_join_flags(unknown)} behind {Opt.SCRIPT} went to the script, and the text of {script} has "
        "no "
        "such name"
    )
    return [f"{went}: options of distlaunch go before {Opt.SCRIPT}"]


def _with_dashes(flag: str) -> str:
    return "--" + flag[2:].replace("_", "-")


def _spellings(flag: str) -> tuple[bytes, bytes]:
    name = flag[2:].encode(errors="surrogateescape")
    return name.replace(b"_", b"-"), name.replace(b"-", b"_")


def _join_flags(flags: Sequence[str]) -> str:
    *others, last = map(printable, flags)
    return f"{', '.join(others)} and {last}" if others else last
