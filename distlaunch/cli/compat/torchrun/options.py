"""The one table of ``distlaunch torchrun``'s options, from which its parser and its help are made.

The options are those of torchrun 2.13, --log-line-prefix-template of 2.14, and the one of
``torch.distributed.launch``. Each row says what the option means here; one whose ``effect`` is
``accepted`` changes nothing, which is said once when it is on the command line.
"""

from __future__ import annotations

from typing import Literal

from distlaunch.cli.option import Option, Spelling
from distlaunch.cli.option_table import TRAIN_OPTIONS

Kind = Literal[
    "text",
    "nodes",
    "workers",
    "whole",
    "port",
    "number",
    "flag",
    "choice",
    "streams",
    "ranks",
    "list",
]
Effect = Literal["does", "accepted"]

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
PREFIX = "[${role_name}${local_rank}]:"


class TorchrunOption(Spelling):
    """One option. ``default`` is written as on the command line; empty: none."""

    kind: Kind
    default: str
    here: str
    """What it means here."""
    effect: Effect = "does"
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The variable that its default may come from."""
        return "PET_" + self.field.upper()


def _row(
    flags: str,
    kind: Kind,
    metavar: str,
    here: str,
    *,
    default: str = "",
    effect: Effect = "does",
    choices: tuple[str, ...] = (),
) -> TorchrunOption:
    words = tuple(flags.split())
    return TorchrunOption(
        flags=words,
        field=words[-1][2:].replace("-", "_"),
        kind=kind,
        default=default,
        metavar="|".join(choices) or metavar,
        here=here,
        effect=effect,
        choices=choices,
    )


OPTIONS: tuple[TorchrunOption, ...] = (
    _row(
        "--nnodes",
        "nodes",
        "N|MIN:MAX",
        "Nodes, each with a launcher; 1:N without an endpoint is this one.",
        default="1:1",
    ),
    _row(
        "--nproc-per-node",
        "workers",
        "N|auto|cpu|gpu|xpu",
        "Workers; auto is one for each GPU, else for each CPU that this container may use.",
        default="1",
    ),
    _row(
        "--rdzv-backend",
        "text",
        "NAME",
        "With static, one node's endpoint or master address and port are rank 0's; all others mean "
        "the same here.",
        default="static",
    ),
    _row(
        "--rdzv-endpoint",
        "text",
        "HOST[:PORT]",
        "Where several launchers meet; of one node, rank 0's address and port, if the backend is "
        "static.",
    ),
    _row("--rdzv-id", "text", "ID", "TORCHELASTIC_RUN_ID, and the start of the log folder's name."),
    _row(
        "--rdzv-conf",
        "text",
        "KEY=VALUE,...",
        "join_timeout (or timeout) is how long nodes may take to come.",
    ),
    _row(
        "--standalone",
        "flag",
        "",
        "A free port is held for rank 0; --rdzv-id is kept all the same.",
    ),
    _row("--max-restarts", "whole", "N", "How often the job may be started again.", default="0"),
    _row(
        "--monitor-interval",
        "number",
        "SECONDS",
        "The end of a worker is noticed at once.",
        default="0.1",
        effect="accepted",
    ),
    _row(
        "--start-method",
        "choice",
        "",
        "Each worker is a program of its own, started anew.",
        default="spawn",
        effect="accepted",
        choices=("spawn", "fork", "forkserver"),
    ),
    _row(
        "--event-log-handler",
        "text",
        "NAME",
        "events.jsonl has every event.",
        default="null",
        effect="accepted",
    ),
    _row(
        "--role", "text", "NAME", "ROLE_NAME, and the start of --tee's prefix.", default="default"
    ),
    _row("-m --module", "flag", "", "SCRIPT is the name of a module, as with python -m."),
    _row("--no-python", "flag", "", "SCRIPT is a program of its own, not run by Python."),
    _row(
        "--run-path",
        "flag",
        "",
        "SCRIPT is a file that Python runs, as it is anyway; wins over --no-python.",
    ),
    _row(
        "--log-dir",
        "text",
        "DIR",
        "Where the job's folder is made; every byte is filed, also without -r or -t.",
    ),
    _row(
        "-r --redirects",
        "streams",
        "0-3|RANK:0-3,...",
        "What the console does not show.",
        default="0",
    ),
    _row(
        "-t --tee",
        "streams",
        "0-3|RANK:0-3,...",
        "What it shows in whole lines with a prefix.",
        default="0",
    ),
    _row("--local-ranks-filter", "ranks", "RANK,...", "The only ranks that the console shows."),
    _row(
        "--duplicate-stdout-filters",
        "list",
        "TEXT,...",
        "Tee'd lines to copy to filtered_stdout.log; ,, is a comma.",
    ),
    _row(
        "--duplicate-stderr-filters",
        "list",
        "TEXT,...",
        "The same for stderr, to filtered_stderr.log.",
    ),
    _row(
        "--log-line-prefix-template",
        "text",
        "TEMPLATE",
        "--tee's prefix, of ${role_name}, ${rank}, ${local_rank} and ${hostname}; "
        "also in TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE.",
        default=PREFIX,
    ),
    _row(
        "--node-rank",
        "whole",
        "0",
        "Which of the nodes this is; without it, c10d numbers them as they come.",
        default="0",
    ),
    _row(
        "--master-addr",
        "text",
        "HOST",
        "MASTER_ADDR, and where several launchers meet, if --master-port is given.",
        default="127.0.0.1",
    ),
    _row(
        "--master-port",
        "port",
        "PORT",
        "Rank 0's port, of several nodes the launchers'; else a free one is held.",
    ),
    _row("--local-addr", "text", "HOST", "MASTER_ADDR, where no static rendezvous names one."),
    _row(
        "--logs-specs",
        "text",
        "NAME",
        "Log files are torchrun's; no plugin is loaded.",
        effect="accepted",
    ),
    _row(
        "--numa-binding",
        "choice",
        "",
        "node and socket: the CPUs of the GPU's NUMA node; exclusive and core-complex: a share of "
        "them.",
        choices=("node", "socket", "exclusive", "core-complex"),
    ),
    _row(
        "--signals-to-handle",
        "text",
        "NAME,...",
        "TERM, INT, HUP and QUIT end the job; USR1 and USR2 are passed on to workers that catch "
        "them, and end nothing.",
        default=SIGNALS,
        effect="accepted",
    ),
    _row(
        "--shutdown-timeout",
        "whole",
        "SECONDS",
        "From TERM to KILL, also after a failure; else TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30.",
    ),
    _row("--virtual-local-rank", "flag", "", "Each worker sees only its own GPU, as device 0."),
    _row(
        "--use-env",
        "flag",
        "",
        "Of torch.distributed.launch: the script gets no --local-rank=N and reads LOCAL_RANK. "
        "torchrun never adds it.",
    ),
)

BY_VARIABLE: tuple[Option, ...] = tuple(
    option for option in TRAIN_OPTIONS if "torchrun" not in option.absent
)
"""Options of ``train`` whose variables (DISTLAUNCH_...) work here too."""
