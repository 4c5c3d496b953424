"""The typer application, generated from the option table: help, completion, and the other commands.

It is loaded for what ``__main__`` does not run itself. Commands with a table of options parse their
words by their own parser; typer gives their help and the completion.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import distlaunch
from distlaunch.cli import parser
from distlaunch.cli.command_help import command_help, default_note
from distlaunch.cli.commands.render import TARGETS, options_of, parse_render, render_file
from distlaunch.cli.error_output import EXIT_INTERRUPTED
from distlaunch.cli.option import Option
from distlaunch.cli.option_table import GROUP_TITLES, HELP_FLAGS, PLAN_OPTIONS, TRAIN_OPTIONS
from distlaunch.cli.pages import show_page, topics
from distlaunch.cli.suggestions import counterpart, instead_of, taken_as_it_is
from distlaunch.core.errors import UsageError
from distlaunch.core.model.text import quoted
from distlaunch.planning.train_options import TrainOptions
from distlaunch.render.request import RenderOptions, Target

Train = Callable[[TrainOptions], int]
Plan = Callable[[TrainOptions, parser.PlanFormat, bool], int]
Render = Callable[[Target, TrainOptions, RenderOptions], int]


def main_train(options: TrainOptions) -> int:
    """Train; returns the exit code."""
    from distlaunch.cli.commands.train import train

    return train(options)


def main_plan(options: TrainOptions, fmt: parser.PlanFormat, expand: bool) -> int:  # noqa: FBT001 - as it is parsed
    """Print the plan; returns the exit code."""
    from distlaunch.cli.commands.train import plan

    return plan(options, fmt, expand=expand)


def run_app(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    train: Train = main_train,
    plan: Plan = main_plan,
    render: Render = render_file,
) -> int:
    """Run the typer application and return the exit code. Raises LaunchError, never one of typer's
    own errors.

    A known command is called without the root before it: newer typer loads pydantic, 100 ms, to
    check root options that are not even there.
    """
    command: Any = typer.main.get_command(build_app(environ, train=train, plan=plan, render=render))
    words = list(argv) or ["--help"]
    if words[0] == "help" and len(words) > 1 and words[1] in topics():
        show_page(words[1])
        return 0
    if words[0] == "help":
        words = [*_known(command, words[1:]), "--help"]
    _refuse_options_of_train(words[0])
    program = "distlaunch"
    if words[0] in command.commands:
        command = command.commands[words[0]]
        program += " " + words.pop(0)
    try:
        result = command.main(words, prog_name=program, standalone_mode=False)
    except typer.Abort:
        return EXIT_INTERRUPTED
    except Exception as error:
        # The class is click's or, in newer typer, that of the copy inside typer: known by what it
        # can do.
        explain = getattr(error, "format_message", None)
        if explain is None:
            raise
        page: str = getattr(getattr(error, "ctx", None), "command_path", program)
        raise UsageError(explain().rstrip("."), hint=f"see {page} --help") from error
    return int(result or 0)


def _known(command: Any, words: Sequence[str]) -> list[str]:
    """Return the words of ``help COMMAND...`` that name a command. Raises UsageError for one that
    there is not."""
    from difflib import get_close_matches

    found: list[str] = []
    for word in words:
        if word in HELP_FLAGS:
            continue
        there = getattr(command, "commands", {})
        if not there:
            break  # arguments of that command, as of one that somebody has begun to write
        if word not in there:
            if found:
                raise UsageError(
                    f"there is no command {quoted(word)}", hint=instead_of([word], [*there])
                )
            near = get_close_matches(word, [*there, *topics()], n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}? " if near else ""
            listed = f"commands: {', '.join(there)}; pages: {', '.join(topics())}"
            raise UsageError(f"there is no command or page {quoted(word)}", hint=f"{meant}{listed}")
        found.append(word)
        command = there[word]
    return found


def _refuse_options_of_train(word: str) -> None:
    """Raise for a first word that is an option of train, or one of torchrun's with what stands for
    it here."""
    flag = word.partition("=")[0].replace("_", "-")
    if flag == "--local-rank":
        raise UsageError(
            f"{quoted(word)}: another launcher adds this for a script, and distlaunch is none",
            hint="deepspeed --no_local_rank leaves it out, and torch.distributed.launch --use_env",
        )
    if any(flag in option.all_flags for option in TRAIN_OPTIONS):
        raise UsageError(
            f"unknown option {quoted(flag)}", hint=f"distlaunch train {flag} ... SCRIPT [ARGS]..."
        )
    if (instead := counterpart(flag)) is not None:
        raise UsageError(
            f"unknown option {quoted(flag)}",
            hint=f"distlaunch train [OPTIONS] SCRIPT; {instead}{taken_as_it_is(flag)}",
        )


def build_app(
    environ: Mapping[str, str], *, train: Train, plan: Plan, render: Render
) -> typer.Typer:
    """Make the application; ``train``, ``plan`` and ``render`` are what its commands call with
    parsed options."""
    app = typer.Typer(
        name="distlaunch",
        cls=_Commands,
        help="Start, watch, explain and restart distributed training.",
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=_settings(),
    )

    @app.callback()
    def _root(
        version: bool = typer.Option(  # noqa: FBT001 - typer makes a flag of it
            False,  # noqa: FBT003 - the flag's default
            "--version",
            metavar="",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ) -> None:
        del version

    _add(
        app,
        lambda words: train(parser.parse_train(words, environ)),
        TRAIN_OPTIONS,
        name="train",
        help_text="Run a training job.",
    )
    _add(
        app,
        lambda words: plan(*parser.parse_plan(words, environ)),
        PLAN_OPTIONS,
        name="plan",
        help_text="Print what train would do; start nothing.",
    )
    _add_torchrun(app, environ)
    _add_drop_in(app, environ, "deepspeed", "DeepSpeed's launcher")
    _add_drop_in(app, environ, "horovodrun", "horovodrun", usage="COMMAND")
    launch = typer.Typer(
        help="Run a command line of accelerate launch.", context_settings=_settings()
    )
    launch.callback()(lambda: None)  # else typer takes the one command for the whole
    _add_drop_in(launch, environ, "accelerate", "accelerate launch", command="launch")
    app.add_typer(launch, name="accelerate")
    _add_render(app, environ, render)
    _add_backends(app, environ)
    _add_help(app)
    return app


class _Commands(TyperGroup):
    """The root command, which names the nearest command for one that does not exist."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise UsageError(
                f"there is no command {quoted(args[0])}", hint=instead_of(args, [*self.commands])
            )
        return super().resolve_command(ctx, args)


class _TableCommand(TyperCommand):
    """A command with a table of options, whose words its own parser takes apart.

    typer only completes them, and shows the help.
    """

    options: Sequence[Option]
    run: Callable[[Sequence[str]], int]
    usage = "SCRIPT"

    def get_help(self, ctx: Any) -> str:
        columns = shutil.get_terminal_size().columns
        return command_help(
            ctx.command_path, self.usage, self.help or "", self.options, self.epilog or "", columns
        ).rstrip("\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx.args = args
        return args

    def invoke(self, ctx: Any) -> int:
        try:
            return self.run(ctx.args)
        except parser.HelpRequested:
            typer.echo(self.get_help(ctx), color=ctx.color)
            return 0

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        del ctx
        return ["[OPTIONS]", self.usage, "[ARGS]..."]


def _settings() -> dict[str, Any]:
    """Make the context settings of the root and its commands."""
    return {
        "help_option_names": [*reversed(HELP_FLAGS)],
        "max_content_width": min(shutil.get_terminal_size().columns, 120),
    }


def _add(
    app: typer.Typer,
    run: Callable[[Sequence[str]], int],
    options: Sequence[Option],
    *,
    name: str,
    help_text: str,
    usage: str = "SCRIPT",
) -> None:
    """Give the application a command with these options, whose words ``run`` takes."""
    parameters = [_parameter(option) for option in options]
    parameters.append(
        inspect.Parameter(
            "words",
            inspect.Parameter.KEYWORD_ONLY,
            annotation=list[str] | None,
            default=typer.Argument(
                None,
                metavar=f"{usage} [ARGS]...",
                help=f"The training {usage.lower()} and its own arguments.",
                show_default=False,
            ),
        )
    )

    def described(**given: object) -> None:
        """Have the signature that the rows describe, for the completion; nothing calls this."""
        del given

    described.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # typer reads it
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    own = {"options": options, "usage": usage, "run": staticmethod(run)}
    settings = _settings() | {
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
    app.command(
        name,
        cls=type("_Command", (_TableCommand,), own),
        help=help_text,
        epilog=_epilog(options, usage),
        context_settings=settings,
    )(described)


def _add_torchrun(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """List the command that parses and explains its words itself: this one is for the help and for
    completion."""
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    for name in ("torchrun", "torch.distributed.launch"):
        text = f"Run a command line of {name}."
        run = _torchrun_command(environ, legacy=name != "torchrun")
        app.command(name, help=text, context_settings=settings, add_help_option=False)(run)


def _torchrun_command(environ: Mapping[str, str], *, legacy: bool) -> Callable[..., int]:
    def run_torchrun(ctx: typer.Context) -> int:
        from distlaunch.cli.compat.torchrun.command import torchrun

        return torchrun(ctx.args, environ, legacy=legacy)

    run_torchrun.__annotations__ = {"ctx": typer.Context}
    return run_torchrun


def _add_drop_in(
    app: typer.Typer,
    environ: Mapping[str, str],
    name: str,
    text: str,
    *,
    usage: str = "SCRIPT",
    command: str = "",
) -> None:
    """Add a command, called as its launcher or ``command``, that takes the launcher's words; its
    help is typer's."""
    options = import_module(f"distlaunch.cli.compat.{name}.options").OPTIONS
    before = [command] if command else []

    def run_drop_in(words: Sequence[str]) -> int:
        module = import_module(f"distlaunch.cli.compat.{name}.command")
        run: Callable[[Sequence[str], Mapping[str, str]], int] = getattr(module, name)
        return run([*before, *words], environ)

    text = f"Run a command line of {text}; train's other options are taken as well."
    _add(app, run_drop_in, options, name=command or name, help_text=text, usage=usage)


def _add_backends(app: typer.Typer, environ: Mapping[str, str]) -> None:
    @app.command(
        "backends",
        help="List the backends, what of them is installed, and their options.",
        context_settings=_settings(),
    )
    def run_backends(
        name: str = typer.Argument(
            None, metavar="[NAME]", help="Only this one, with its options.", show_default=False
        ),
        fmt: str = typer.Option("table", "--format", metavar="table|json", help="How to print it."),
        python: str = typer.Option(
            None,
            "--python",
            metavar="PATH",
            help="The workers' Python, which is asked what it has.",
            show_default=False,
        ),
    ) -> int:
        from distlaunch.cli.commands.backends import backends

        if fmt not in ("table", "json"):
            raise UsageError(f"--format takes table or json, not {quoted(fmt)}")
        named = (("--python", python), ("DISTLAUNCH_PYTHON", environ.get("DISTLAUNCH_PYTHON")))
        chosen = next(((who, path) for who, path in named if path), None)
        return backends(name, "json" if fmt == "json" else "table", python=chosen)


def _add_help(app: typer.Typer) -> None:
    """List the command ``help``: ``run_app`` answers it before typer sees it."""

    @app.command(
        "help",
        help="Show the help of a command, or a page of the documentation.",
        epilog=f"Pages: {', '.join(topics())}.",
        context_settings=_settings(),
    )
    def run_help(
        words: list[str] = typer.Argument(  # noqa: B008 - typer reads it
            None, metavar="[COMMAND | PAGE]", help="Which command or page.", show_default=False
        ),
    ) -> None:
        del words


class _Files(TyperGroup):
    """The command ``render``, which says what it can print."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            raise UsageError(
                "render what?",
                hint=f"distlaunch render {'|'.join(TARGETS)} [OPTIONS] SCRIPT [ARGS]...",
            )
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise UsageError(
                f"render prints {', '.join(TARGETS)}, and no {quoted(args[0])}",
                hint="distlaunch render --help",
            )
        return super().resolve_command(ctx, args)


def _add_render(app: typer.Typer, environ: Mapping[str, str], render: Render) -> None:
    """Add ``render`` with a command for each kind of file."""
    files = typer.Typer(
        cls=_Files,
        help="Print a batch script or manifests that run train on a cluster.",
        context_settings=_settings(),
    )
    for target, help_text in TARGETS.items():
        _add(
            files,
            _render_command(target, environ, render),
            options_of(target),
            name=target,
            help_text=help_text,
        )
    app.add_typer(files, name="render")


def _render_command(
    target: Target, environ: Mapping[str, str], render: Render
) -> Callable[[Sequence[str]], int]:
    return lambda words: render(target, *parse_render(target, words, environ))


def _epilog(options: Sequence[Option], usage: str) -> str:
    *others, last = [option.flags[0] for option in options if option.variable is None]
    said = {
        option.field: f"{option.name} in {option.variable}"
        for option in options
        if option.variable is not None
    }
    odd = " and ".join(said[field] for field in ("job_id", "backend") if field in said)
    of_render = any(option.group == "render" for option in options)
    own = ", those of render alone in DISTLAUNCH_RENDER_NAME and so on" if of_render else ""
    return (
        f"Options have a default in the environment: {said.get('num_gpus') or said['hosts']}, and "
        f"so on; {odd}{own}; "
        f"none have {', '.join(others)} and {last}. The command line wins. "
        f"What follows {usage}, or --, reaches the {usage.lower()} byte for byte."
    )


def _parameter(option: Option) -> inspect.Parameter:
    """Make one parameter; all values stay texts, which ``build`` converts."""
    flag = option.kind == "flag"
    annotation = bool | None if flag else list[str] | None if option.repeatable else str | None
    flags = (
        option.flags
        if option.negation is None
        else (*option.flags[:-1], f"{option.name}/{option.negation}")
    )
    default = typer.Option(
        None,
        *flags,
        help=option.help + default_note(option),
        metavar="" if flag else option.metavar,
        show_default=False,
        rich_help_panel=GROUP_TITLES[option.group],
        autocompletion=_completer(option.choices) if option.choices else None,
    )
    return inspect.Parameter(
        option.field, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _completer(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Make a function that completes one of ``choices``."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer's callback signature
    if value:
        typer.echo(f"distlaunch {distlaunch.__version__}")
        raise typer.Exit
