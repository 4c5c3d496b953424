"""Translate the command line of torchrun into options of train, options of its output, and
notices."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from typing import Any, Literal

from distlaunch.cli.compat.torchrun.command_line import Parsed
from distlaunch.cli.compat.torchrun.options import BY_VARIABLE, OPTIONS, PREFIX, SIGNALS
from distlaunch.cli.option import option_error
from distlaunch.cli.option_table import TRAIN_OPTIONS
from distlaunch.cli.parser import build
from distlaunch.core.errors import ConfigError, UsageError
from distlaunch.core.model.option_names import OptionNames
from distlaunch.core.model.record import Record, replace
from distlaunch.core.model.text import quoted
from distlaunch.planning.rendezvous import DEFAULT_PORT
from distlaunch.planning.train_options import TorchrunOptions

Mode = Literal["raw", "tee", "hidden"]
_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_MACRO = "${local_rank}"
"""Stands for the local rank in the script's arguments."""
_TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_AGENT_VARIABLES = ("TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_HEALTH_CHECK_PORT")
"""A watchdog and a health check of torchrun's agent. distlaunch has neither."""
_TIMEOUT_S = 30.0
_JOIN_S = 600.0
"""How long torchrun's rendezvous waits for nodes."""
NODE_RANK_HINT = (
    "--node-rank N says which of the nodes this is, --rdzv-backend c10d numbers them as they come"
)
"""The hint for launchers of a static rendezvous that are all node 0."""
_JOIN_KEYS = ("join_timeout", "timeout")
"""Keys of the time limit in --rdzv-conf. The first one present counts."""
_JOIN_DIGITS = 9

_SCRIPT = next(option for option in TRAIN_OPTIONS if option.field == "script")


class TorchrunTranslation(Record):
    """A translated command. ``notices`` are printed unless ``silent``. ``assumed``: this launcher
    is node 0 only by default."""

    options: TorchrunOptions
    display: OutputOptions
    notices: tuple[str, ...]
    silent: bool
    assumed: bool


def translate(
    parsed: Parsed, environ: Mapping[str, str], *, legacy: bool = False
) -> TorchrunTranslation:
    """Translate a parsed command line.

    ``legacy``: the script gets ``--local-rank=N`` unless ``--use-env`` is set. Raises UsageError or
    ConfigError for options that distlaunch does not support.
    """
    given = parsed.values
    adds_local_rank = legacy and not given["use_env"]
    if adds_local_rank and given["no_python"] and not given["run_path"]:
        raise UsageError(
            "--no-python needs --use-env",
            hint="a program that is no Python script reads LOCAL_RANK in its environment",
        )
    if given["module"] and given["no_python"] and not given["run_path"]:
        raise UsageError(
            "--module and --no-python exclude each other", hint="a module needs Python to run it"
        )
    script_args = (
        (f"--local-rank={_MACRO}", *parsed.script_args) if adds_local_rank else parsed.script_args
    )
    values = build({"script": [parsed.script]}, script_args, environ, [_SCRIPT, *BY_VARIABLE])
    silent = values.get("quiet") is True
    values["quiet"] = values.get("quiet", True)
    values["module"] = given["module"] and not given["run_path"]
    values["no_python"] = given["no_python"] and not given["run_path"]
    if not values["no_python"] and not given["run_path"] and environ.get("PYTHON_EXEC"):
        values["python"] = environ["PYTHON_EXEC"]
    sources = dict(parsed.sources)
    if (log_dir := given["log_dir"]) is not None and log_dir != os.devnull:
        values["log_dir"] = log_dir
    elif "log_dir" in values:
        sources["log_dir"] = "DISTLAUNCH_LOG_DIR"
    if given["standalone"] or given["rdzv_backend"] != "static":
        sources["master_addr"] = sources["local_addr"]
    elif (given["rdzv_endpoint"] or "").strip():
        sources["master_addr"] = sources["rdzv_endpoint"]
    else:
        sources["rdzv_endpoint"] = sources["master_addr"]
    values["master_addr"], values["master_port"] = _master_endpoint(parsed)
    values.update(_node_options(parsed))
    values["grace"] = _shutdown_timeout(given, environ)
    values.setdefault("failure_grace", values["grace"])
    if (binding := given["numa_binding"]) is not None:
        values["bind"] = "numa" if binding in ("node", "socket") else "cores"
    options = TorchrunOptions(
        **values,
        max_restarts=given["max_restarts"],
        isolate_gpus=given["virtual_local_rank"],
        workers=given["nproc_per_node"],
    )
    template = given["log_line_prefix_template"]
    if template == PREFIX and environ.get(_TEMPLATE_VARIABLE):
        template = environ[_TEMPLATE_VARIABLE]
    assumed = options.node_rank == 0 and not _is_ranked(parsed)
    no_files = log_dir == os.devnull
    display = OutputOptions(
        redirects=0 if no_files else given["redirects"],
        tee=0 if no_files else given["tee"],
        only=given["local_ranks_filter"],
        template=template or PREFIX,
        role=given["role"] or "",
        stdout_filters=given["duplicate_stdout_filters"] or (),
        stderr_filters=given["duplicate_stderr_filters"] or (),
    )
    dialect = replace(
        options.dialect,
        run_id=given["rdzv_id"],
        role=display.role,
        prefix_columns=_prefix_columns(display) if display.tee else 0,
        shows_bars="hidden" not in (display.mode(0, 1), display.mode(0, 2)),
        names=_option_names(sources, assumed=assumed),
    )
    options = replace(options, dialect=dialect)
    notices = _idle_notices(parsed, environ)
    return TorchrunTranslation(
        options=options, display=display, notices=notices, silent=silent, assumed=assumed
    )


def _master_endpoint(parsed: Parsed) -> tuple[str | None, int | None]:
    """Return rank 0's address and port; None if distlaunch chooses.

    The endpoint of a static rendezvous is rank 0's. With another rendezvous, as in torchrun, rank 0
    gets a free port.
    """
    given = parsed.values
    host, port = _read_endpoint(parsed)
    local = _without_brackets(given["local_addr"])
    if given["standalone"] or given["rdzv_backend"] != "static":
        return local, None
    if host is not None:
        return host, port
    if given["master_port"] is None:
        return local, None
    return _without_brackets(given["master_addr"]), given["master_port"] or None


def _read_endpoint(parsed: Parsed) -> tuple[str | None, int | None]:
    """Return the host and port of --rdzv-endpoint. Raises ConfigError if it is invalid, or is
    static and has no port."""
    given, source = parsed.values, parsed.sources["rdzv_endpoint"]
    text = (given["rdzv_endpoint"] or "").strip()
    found = _parse_endpoint(text, source)
    names_port = text.rpartition(":")[1] and not text.endswith("]")
    if text and not names_port and given["rdzv_backend"] == "static" and not given["standalone"]:
        raise option_error(
            source,
            f"takes HOST:PORT with the static rendezvous, not {quoted(text)}",
            hint=f"{text}:29500, or --rdzv-backend c10d, which has a port of its own",
        )
    return found


def _parse_endpoint(text: str, source: str) -> tuple[str | None, int | None]:
    text = text.strip()
    if not text:
        return None, None
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, number = text, "0"
    if not (number.isascii() and number.isdigit() and len(number) <= 5 and int(number) <= 65535):
        raise option_error(
            source, f"takes HOST:PORT with a port from 0 to 65535, not {quoted(text)}"
        )
    is_name = all(letter.isalnum() or letter in "_.:-" for letter in _without_brackets(host) or "")
    if not host or not is_name or host.startswith("[") != host.endswith("]"):
        raise option_error(source, f"takes HOST:PORT, not {quoted(text)}")
    return _without_brackets(host), int(number) or None


def _without_brackets(host: str | None) -> str | None:
    return host[1:-1] if host and host[0] == "[" and host[-1] == "]" else host


def _node_options(parsed: Parsed) -> dict[str, object]:
    """Return the options with which several nodes find each other; none for a job on this node
    alone.

    The endpoint of a static rendezvous is node 0's address. Its port serves the launchers'
    rendezvous; rank 0 gets a free port.
    """
    given = parsed.values
    join_timeout = _join_timeout(given["rdzv_conf"], parsed.sources["rdzv_conf"])
    least, most = given["nnodes"]
    node_rank = (
        given["node_rank"] if _is_ranked(parsed) or given["rdzv_backend"] == "static" else None
    )
    alone = most == 1 or given["standalone"]
    host, port = _read_endpoint(parsed)
    if host is None and given["rdzv_backend"] == "static" and given["master_port"] is not None:
        host, port = _without_brackets(given["master_addr"]), given["master_port"] or None
    size = f"{least}:{most}" if least != most or most == 1 else str(least)
    if alone and max(least, (node_rank or 0) + 1) > 1:
        said = "--standalone" if given["standalone"] else f"{parsed.sources['nnodes']} {size}"
        named = (
            f"{parsed.sources['nnodes']} {size}"
            if least > 1
            else f"{parsed.sources['node_rank']} {node_rank}"
        )
        raise ConfigError(
            f"{said} and {named} exclude each other", hint="--nnodes says how many nodes there are"
        )
    if alone or (host is None and least == 1 and not node_rank):
        return {}
    if host is None:
        raise ConfigError(
            f"{parsed.sources['nnodes']} {size}: nothing says where the nodes meet",
            hint="--rdzv-endpoint HOST:PORT, or --master-addr HOST --master-port PORT; HOST being "
            "node 0",
        )
    where = f"[{host}]" if ":" in host else host
    found: dict[str, object] = {
        "num_nodes": most if least == most else (least, most),
        "node_rank": node_rank,
        "rendezvous": f"{where}:{port or DEFAULT_PORT}",
        "master_port": None,
        "source": "flags",
        "join_timeout": join_timeout,
    }
    return (
        found
        if given["rdzv_backend"] == "static"
        else {**found, "master_addr": _without_brackets(given["local_addr"])}
    )


def _is_ranked(parsed: Parsed) -> bool:
    return parsed.sources["node_rank"] != "--node-rank" or "node_rank" in {
        option.field for option in parsed.given
    }


def _join_timeout(conf: str | None, source: str) -> float:
    """Return the time that nodes have to join, in seconds. Raises ConfigError for a text that
    torchrun does not accept."""
    items = [item.partition("=") for item in conf.split(",")] if conf and conf.strip() else []
    entries = [(key.strip(), _strip_quotes(value.strip())) for key, _, value in items]
    pairs = dict(entries)
    if not all(key and value for key, value in entries):
        raise option_error(source, f"takes KEY=VALUE,KEY=VALUE, not {quoted(conf or '')}")
    for name in _JOIN_KEYS:
        text = pairs.get(name, "1")
        if not (
            text.isascii() and text.isdecimal() and len(text) <= _JOIN_DIGITS and int(text) > 0
        ):
            raise option_error(
                source, f"takes {name} as a whole number of seconds from 1, not {quoted(text)}"
            )
    return next((float(pairs[name]) for name in _JOIN_KEYS if name in pairs), _JOIN_S)


def _strip_quotes(value: str) -> str:
    quotes = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1].strip() if quotes else value


def _shutdown_timeout(given: Mapping[str, Any], environ: Mapping[str, str]) -> float:
    if given["shutdown_timeout"] is not None:
        return float(given["shutdown_timeout"])
    text = environ.get(_TIMEOUT_VARIABLE, "").strip()
    if not text:
        return _TIMEOUT_S
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ConfigError(
            f"{_TIMEOUT_VARIABLE} takes a whole number of seconds, not {quoted(text)}"
        )
    return float(text)


class OutputOptions(Record):
    """How each local rank's streams are shown, and which lines are copied."""

    redirects: Mapping[int, int] | int = 0
    tee: Mapping[int, int] | int = 0
    only: frozenset[int] | None = None
    template: str = PREFIX
    role: str = "default"
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()

    @property
    def is_raw(self) -> bool:
        """Whether output is shown unchanged, so that the only worker may have the terminal."""
        return not self.redirects and not self.tee and self.only is None

    def mode(self, rank: int, stream: int) -> Mode:
        """Return how a stream of the worker with local rank ``rank`` is shown.

        ``stream`` is 1 for stdout, 2 for stderr, like the bits in the values of -r and -t.
        """
        if self.only is not None and rank not in self.only:
            return "hidden"
        if _stream_bits(self.tee, rank) & stream:
            return "tee"
        return "hidden" if _stream_bits(self.redirects, rank) & stream else "raw"

    def prefix(self, local_rank: int, hostname: str, *, rank: int) -> bytes:
        """Return the prefix of a worker's lines."""
        if self.template == PREFIX:
            return f"[{self.role}{local_rank}]:".encode(errors="surrogateescape")
        from string import Template

        values = {
            "role_name": self.role,
            "rank": rank,
            "local_rank": local_rank,
            "hostname": hostname,
        }
        return Template(self.template).safe_substitute(values).encode(errors="surrogateescape")

    def filters(self, stream: int) -> tuple[bytes, ...]:
        """Return the texts of a stream's filter. Lines that contain one of them are copied."""
        words = self.stdout_filters if stream == 1 else self.stderr_filters
        return tuple(word.encode(errors="surrogateescape") for word in words)

    def beyond(self, workers: int) -> list[str]:
        """Return warnings about options that name local ranks that the job does not have."""
        named = {
            "--redirects": self.redirects if isinstance(self.redirects, Mapping) else (),
            "--tee": self.tee if isinstance(self.tee, Mapping) else (),
            "--local-ranks-filter": self.only or (),
        }
        return [
            f"{flag} names local rank {max(ranks)}, and the last of this job is {workers - 1}"
            for flag, ranks in named.items()
            if ranks and max(ranks) >= workers
        ]


def _stream_bits(streams: Mapping[int, int] | int, rank: int) -> int:
    return streams if isinstance(streams, int) else streams.get(rank, 0)


def _prefix_columns(display: OutputOptions) -> int:
    return len(display.prefix(10, "", rank=10).decode(errors="surrogateescape"))


def _option_names(sources: Mapping[str, str], *, assumed: bool) -> OptionNames:
    """Return the names of options in messages: torchrun's, or the variables that set them.

    With ``assumed``, a port in use may belong to another launcher that is node 0 as well.
    """
    own = {option.name: sources[option.field] for option in OPTIONS}
    names = {"backend": "the backend"}
    for option in BY_VARIABLE:
        names[option.field] = own.get(option.name, option.variable or option.name)
    absences = {
        option.field: option.absent["torchrun"]
        for option in TRAIN_OPTIONS
        if "torchrun" in option.absent and option.field not in ("script", "backend")
    }
    for field, absence in absences.items():
        if absence.instead:
            names[field] = own.get(absence.instead, absence.instead)
    names["rendezvous_port"] = names["rendezvous"]
    names["failure_grace"] = names["grace"]  # --failure-grace is as long as --grace by default
    return OptionNames(
        names=names,
        with_value={"failure_grace": "DISTLAUNCH_FAILURE_GRACE={}"},
        with_this_value={
            ("env", "PYTHONFAULTHANDLER=1"): "PYTHONFAULTHANDLER=1",
            ("opt", "local-rank=off"): "--use-env",
        },
        absent=frozenset(absences.keys() - names.keys()),
        port_in_use=f"{NODE_RANK_HINT}; or use another port" if assumed else None,
    )


def _idle_notices(parsed: Parsed, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return notices about options without effect. PET_ variables are not reported."""
    given, values = {option.field for option in parsed.given}, parsed.values
    idle = [
        option.name
        for option in parsed.given
        if option.effect == "accepted" and values[option.field] is not None
    ]
    if "rdzv_conf" in given and not _node_options(parsed):
        idle.insert(0, "--rdzv-conf")
    if "signals_to_handle" in given and set(str(values["signals_to_handle"]).split(",")) <= set(
        SIGNALS.split(",")
    ):
        idle.remove("--signals-to-handle")
    if "rdzv_backend" in given and values["rdzv_backend"] not in ("static", "c10d", None):
        idle.append(f"--rdzv-backend {quoted(values['rdzv_backend'])}")
    idle += [name for name in _AGENT_VARIABLES if environ.get(name, "0") != "0"]
    notices = []
    if idle:
        notices.append(f"without effect here: {', '.join(idle)} (see distlaunch torchrun --help)")
    if "nnodes" in given and values["nnodes"][1] > 1 and not _node_options(parsed):
        notices.append(
            f"--nnodes 1:{values['nnodes'][1]}: this one node runs; --rdzv-endpoint lets others "
            "join"
        )
    return tuple(notices)


def unread_variables(environ: Mapping[str, str]) -> list[str]:
    """Return warnings about variables of train that ``distlaunch torchrun`` does not read."""
    unread = [
        option
        for option in TRAIN_OPTIONS
        if "torchrun" in option.absent
        and option.variable is not None
        and environ.get(option.variable)
    ]
    if not unread:
        return []
    variables = {option.name: f"{option.name} or {option.variable}" for option in OPTIONS}
    told = []
    for option in unread:
        instead = option.absent["torchrun"].instead
        told.append(
            f"{option.variable} (here: {variables.get(instead, instead)})"
            if instead
            else option.variable
        )
    return [f"not read by distlaunch torchrun: {', '.join(map(str, told))}"]
