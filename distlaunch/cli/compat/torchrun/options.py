"""The option table of ``distlaunch torchrun``.

The table has the options of torchrun 2.13 and of ``torch.distributed.launch``, and
--log-line-prefix-template, which torchrun has since 2.14. An option whose ``effect`` is
``accepted`` changes nothing; one notice names all of these options that the user gave.
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
    """An option of torchrun. ``default`` is a text as on the command line, empty if there is none.
    ``here`` says what the option does in distlaunch."""

    kind: Kind
    default: str
    here: str
    effect: Effect = "does"
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The environment variable that may hold another default."""
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
        "Number of nodes, each with its own launcher. 1:N without an endpoint runs "
        "on this node alone.",
        default="1:1",
    ),
    _row(
        "--nproc-per-node",
        "workers",
        "N|auto|cpu|gpu|xpu",
        "Number of workers on each node. auto is one per GPU, or without GPUs one "
        "per CPU that this container may use.",
        default="1",
    ),
    _row(
        "--rdzv-backend",
        "text",
        "NAME",
        "How the launchers meet. With static on one node, the endpoint or the master "
        "address and port are those of rank 0. All other backends are the same here.",
        default="static",
    ),
    _row(
        "--rdzv-endpoint",
        "text",
        "HOST[:PORT]",
        "Address at which the launchers meet. On one node with static, address and port of rank 0.",
    ),
    _row(
        "--rdzv-id",
        "text",
        "ID",
        "Value of TORCHELASTIC_RUN_ID, and the start of the log directory's name.",
    ),
    _row(
        "--rdzv-conf",
        "text",
        "KEY=VALUE,...",
        "join_timeout (or timeout) is the time that nodes have to join.",
    ),
    _row(
        "--standalone",
        "flag",
        "",
        "Use a free port for rank 0. --rdzv-id is kept.",
    ),
    _row(
        "--max-restarts",
        "whole",
        "N",
        "How often the job may restart after a failure.",
        default="0",
    ),
    _row(
        "--monitor-interval",
        "number",
        "SECONDS",
        "distlaunch notices the end of a worker at once.",
        default="0.1",
        effect="accepted",
    ),
    _row(
        "--start-method",
        "choice",
        "",
        "Each worker is a new process.",
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
        "--role",
        "text",
        "NAME",
        "Value of ROLE_NAME, and the start of the prefix of --tee.",
        default="default",
    ),
    _row("-m --module", "flag", "", "SCRIPT is the name of a module, as with python -m."),
    _row("--no-python", "flag", "", "SCRIPT is an executable program, which is not run by Python."),
    _row(
        "--run-path",
        "flag",
        "",
        "Run SCRIPT as a file with Python, as by default. Overrides --no-python.",
    ),
    _row(
        "--log-dir",
        "text",
        "DIR",
        "Directory for the job's log directory. Log files have all output, also without -r and -t.",
    ),
    _row(
        "-r --redirects",
        "streams",
        "0-3|RANK:0-3,...",
        "Streams that the console does not show: 1 is stdout, 2 is stderr, 3 is both.",
        default="0",
    ),
    _row(
        "-t --tee",
        "streams",
        "0-3|RANK:0-3,...",
        "Streams that the console shows in whole lines with a prefix: 1 is stdout, 2 "
        "is stderr, 3 is both.",
        default="0",
    ),
    _row("--local-ranks-filter", "ranks", "RANK,...", "Show the output of these local ranks only."),
    _row(
        "--duplicate-stdout-filters",
        "list",
        "TEXT,...",
        "Copy tee'd lines that contain one of these texts to filtered_stdout.log. ,, "
        "stands for a comma.",
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
        "Prefix of --tee, with ${role_name}, ${rank}, ${local_rank} and ${hostname}. "
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE sets it, too.",
        default=PREFIX,
    ),
    _row(
        "--node-rank",
        "whole",
        "0",
        "Rank of this node. With c10d, nodes without one are numbered as they join.",
        default="0",
    ),
    _row(
        "--master-addr",
        "text",
        "HOST",
        "Value of MASTER_ADDR. With --master-port, also the address at which several "
        "launchers meet.",
        default="127.0.0.1",
    ),
    _row(
        "--master-port",
        "port",
        "PORT",
        "Port of rank 0; of several nodes, the port at which the launchers meet. "
        "Without it, a free port is used.",
    ),
    _row(
        "--local-addr",
        "text",
        "HOST",
        "Value of MASTER_ADDR, unless a static rendezvous names one.",
    ),
    _row(
        "--logs-specs",
        "text",
        "NAME",
        "Log files are laid out as by torchrun. No plugin is loaded.",
        effect="accepted",
    ),
    _row(
        "--numa-binding",
        "choice",
        "",
        "Bind each worker to CPUs. node and socket: the CPUs of the GPU's NUMA node. "
        "exclusive and core-complex: a share of these CPUs.",
        choices=("node", "socket", "exclusive", "core-complex"),
    ),
    _row(
        "--signals-to-handle",
        "text",
        "NAME,...",
        "TERM, INT, HUP and QUIT end the job. USR1 and USR2 go to the workers that handle them.",
        default=SIGNALS,
        effect="accepted",
    ),
    _row(
        "--shutdown-timeout",
        "whole",
        "SECONDS",
        "Time between SIGTERM and SIGKILL, also after a failure. Without it, "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT applies, else 30.",
    ),
    _row("--virtual-local-rank", "flag", "", "Show each worker only its own GPU, as device 0."),
    _row(
        "--use-env",
        "flag",
        "",
        "For torch.distributed.launch: do not add --local-rank=N to the script's "
        "arguments. The script reads LOCAL_RANK. torchrun never adds it.",
    ),
)

BY_VARIABLE: tuple[Option, ...] = tuple(
    option for option in TRAIN_OPTIONS if "torchrun" not in option.absent
)
"""Options of ``train`` whose variables (DISTLAUNCH_...) work here too."""
