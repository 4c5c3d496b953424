"""The typer application.

``__main__`` loads it only for ``backends`` and for unknown commands. Commands with an option table
parse their arguments with ``cli/parser``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import distlaunch
from distlaunch.cli import parser
from distlaunch.cli.commands.jobs_options import JOB_OPTIONS
from distlaunch.cli.commands.render import TARGETS, parse_render, render_file
from distlaunch.cli.error_output import EXIT_INTERRUPTED
from distlaunch.cli.help import (
    ABOUT,
    BACKENDS_OPTIONS,
    SUMMARIES,
    answer_help,
    help_text,
    print_help,
    print_version,
)
from distlaunch.cli.help_layout import terminal_columns
from distlaunch.cli.option_table import HELP_FLAGS, TRAIN_OPTIONS
from distlaunch.cli.suggestions import drop_in_note, replace_torchrun_option, suggest_command
from distlaunch.core.errors import UsageError
from distlaunch.core.model.text import near_choices, quoted
from distlaunch.planning.train_options import TrainOptions
from distlaunch.render.request import RenderOptions, Target

Train = Callable[[TrainOptions], int]
Plan = Callable[[TrainOptions, parser.PlanFormat, bool], int]
Render = Callable[[Target, TrainOptions, RenderOptions], int]


def main_train(options: TrainOptions) -> int:
    """Run a job and return the exit code."""
    from distlaunch.cli.commands.train import train

    return train(options)


def main_plan(options: TrainOptions, fmt: parser.PlanFormat, expand: bool) -> int:  # noqa: FBT001 - as it is parsed
    """Print the plan and return the exit code.

    With ``expand``, JSON repeats the variables that all workers share in each worker's ``env``.
    """
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
    """Run the typer application and return the exit code.

    Errors of typer are raised as LaunchError. A known command is called directly: for the root
    command, newer typer versions load pydantic (100 ms).
    """
    command: Any = typer.main.get_command(build_app(environ, train=train, plan=plan, render=render))
    words = list(argv) or ["--help"]
    _refuse_options_of_train(words[0])
    program = "distlaunch"
    if words[0] in command.commands:
        command = command.commands[words[0]]
        program += " " + words.pop(0)
    try:
        result = command.main(words, prog_name=program, standalone_mode=False)
    except parser.HelpRequested:
        return print_help(argv, environ)
    except typer.Abort:
        return EXIT_INTERRUPTED
    except Exception as error:
        # The class is click's or, in newer typer, that of the copy of click inside typer. Both
        # have this method.
        explain = getattr(error, "format_message", None)
        if explain is None:
            raise
        page: str = getattr(getattr(error, "ctx", None), "command_path", program)
        raise UsageError(explain().rstrip("."), hint=f"see {page} --help") from error
    return int(result or 0)


def _refuse_options_of_train(word: str) -> None:
    """Raise UsageError if ``word`` is an option of train or torchrun, or one that another program
    adds; else do nothing.

    The hint names the command, or our option that replaces torchrun's.
    """
    flag = word.partition("=")[0].replace("_", "-")
    if flag == "--local-rank":
        raise UsageError(
            f"{quoted(word)}: another launcher adds this for a script, and distlaunch is none",
            hint="deepspeed --no_local_rank leaves it out, and torch.distributed.launch --use_env",
        )
    if flag in ("--install-completion", "--show-completion"):
        raise UsageError(
            f"unknown option {quoted(flag)}",
            hint="distlaunch completion SHELL prints the script; distlaunch help install explains it",
        )
    if any(flag in option.all_flags for option in TRAIN_OPTIONS):
        raise UsageError(
            f"unknown option {quoted(flag)}", hint=f"distlaunch train {flag} ... SCRIPT [ARGS]..."
        )
    if (instead := replace_torchrun_option(flag)) is not None:
        raise UsageError(
            f"unknown option {quoted(flag)}",
            hint=f"distlaunch train [OPTIONS] SCRIPT; {instead}{drop_in_note(flag)}",
        )


def build_app(
    environ: Mapping[str, str], *, train: Train, plan: Plan, render: Render
) -> typer.Typer:
    """Return the typer application."""
    app = typer.Typer(
        name="distlaunch",
        cls=_Commands,
        help=ABOUT,
        rich_markup_mode="rich",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings=_context_settings(),
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

    _add_command(app, lambda words: train(parser.parse_train(words, environ)), name="train")
    _add_command(app, lambda words: plan(*parser.parse_plan(words, environ)), name="plan")
    for name in ("torchrun", "torch.distributed.launch"):
        _add_torchrun(app, environ, name)
    _add_drop_in(app, environ, "deepspeed")
    _add_drop_in(app, environ, "horovodrun")
    launch = typer.Typer(
        cls=_Group, help=SUMMARIES["accelerate", "launch"], context_settings=_context_settings()
    )
    launch.callback()(lambda: None)  # otherwise typer runs the only command without its name
    _add_drop_in(launch, environ, "accelerate", command="launch")
    app.add_typer(launch, name="accelerate")
    _add_render(app, environ, render)
    _add_backends(app, environ)
    for name in JOB_OPTIONS:
        _add_command(app, partial(_run_job_command, name, environ=environ), name=name)
    _add_help(app, environ)
    _add_completion(app, environ)
    return app


def _help_of(ctx: Any) -> str:
    words = ctx.command_path.split()[1:]
    return help_text(words, terminal_columns(os.environ)).rstrip("\n")


class _Command(TyperCommand):
    def get_help(self, ctx: Any) -> str:
        return _help_of(ctx)


class _Group(TyperGroup):
    def get_help(self, ctx: Any) -> str:
        return _help_of(ctx)


class _Commands(_Group):
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise UsageError(
                f"there is no command {quoted(args[0])}",
                hint=suggest_command(args, [*self.commands]),
            )
        return super().resolve_command(ctx, args)


class _TableCommand(_Command):
    run: Callable[[Sequence[str]], int]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def invoke(self, ctx: Any) -> int:
        return self.run(ctx.args)


def _context_settings() -> dict[str, Any]:
    return {
        "help_option_names": [*reversed(HELP_FLAGS)],
    }


def _add_command(
    app: typer.Typer,
    run: Callable[[Sequence[str]], int],
    *,
    name: str,
    path: tuple[str, ...] = (),
) -> None:
    def nothing() -> None:
        """Has no parameters, which typer reads. The function is never called."""

    own = {"run": staticmethod(run)}
    app.command(
        name,
        cls=type("_Described", (_TableCommand,), own),
        help=SUMMARIES[path or (name,)],
        context_settings=_context_settings(),
    )(nothing)


def _add_torchrun(app: typer.Typer, environ: Mapping[str, str], name: str) -> None:
    def run_torchrun(words: Sequence[str]) -> int:
        from distlaunch.cli.compat.torchrun.command import torchrun

        return torchrun(words, environ, legacy=name != "torchrun")

    _add_command(app, run_torchrun, name=name)


def _add_drop_in(
    app: typer.Typer, environ: Mapping[str, str], name: str, *, command: str = ""
) -> None:
    before = [command] if command else []

    def run_drop_in(words: Sequence[str]) -> int:
        module = import_module(f"distlaunch.cli.compat.{name}.command")
        run: Callable[[Sequence[str], Mapping[str, str]], int] = getattr(module, name)
        return run([*before, *words], environ)

    _add_command(app, run_drop_in, name=command or name, path=(name, *before))


def _run_job_command(name: str, words: Sequence[str], *, environ: Mapping[str, str]) -> int:
    from distlaunch.cli.commands.jobs import run_job_command

    return run_job_command([name, *words], environ)


def _add_backends(app: typer.Typer, environ: Mapping[str, str]) -> None:
    @app.command(
        "backends",
        cls=_Command,
        help=SUMMARIES[("backends",)],
        context_settings=_context_settings(),
    )
    def run_backends(
        name: str = typer.Argument(
            None, metavar="[NAME]", help="Only this one, with its options.", show_default=False
        ),
        fmt: str = typer.Option(
            "table", "--format", metavar="table|json", help=BACKENDS_OPTIONS["format"][1]
        ),
        python: str = typer.Option(
            None,
            "--python",
            metavar="PATH",
            help=BACKENDS_OPTIONS["python"][1],
            show_default=False,
        ),
    ) -> int:
        from distlaunch.cli.commands.backends import backends

        if fmt not in ("table", "json"):
            raise UsageError(f"--format takes table or json, not {quoted(fmt)}")
        named = (("--python", python), ("DISTLAUNCH_PYTHON", environ.get("DISTLAUNCH_PYTHON")))
        chosen = next(((who, path) for who, path in named if path), None)
        return backends(name, "json" if fmt == "json" else "table", python=chosen)


def _add_help(app: typer.Typer, environ: Mapping[str, str]) -> None:
    @app.command(
        "help",
        cls=_Command,
        help=SUMMARIES[("help",)],
        context_settings=_context_settings(),
    )
    def run_help(
        words: list[str] = typer.Argument(  # noqa: B008 - typer reads it
            None, metavar="[COMMAND | PAGE | WORD]", show_default=False
        ),
    ) -> int:
        return answer_help(words or [], environ)

    @app.command(
        "version", cls=_Command, help=SUMMARIES[("version",)], context_settings=_context_settings()
    )
    def run_version() -> int:
        return print_version()


def _add_completion(app: typer.Typer, environ: Mapping[str, str]) -> None:
    def run_completion(words: Sequence[str]) -> int:
        from distlaunch.cli.completion import completion

        return completion(words, environ)

    _add_command(app, run_completion, name="completion")


class _Files(_Group):
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            near = near_choices(args[0], list(TARGETS))
            raise UsageError(
                f"render prints {', '.join(TARGETS)}, and no {quoted(args[0])}",
                hint=f"did you mean {near[0]}?" if near else "distlaunch render --help",
            )
        return super().resolve_command(ctx, args)


def _add_render(app: typer.Typer, environ: Mapping[str, str], render: Render) -> None:
    files = typer.Typer(
        cls=_Files,
        help="Print a file that runs a training job on a cluster.",
        context_settings=_context_settings(),
    )
    for target in TARGETS:
        run = _render_command(target, environ, render)
        _add_command(files, run, name=target, path=("render", target))
    app.add_typer(files, name="render")


def _render_command(
    target: Target, environ: Mapping[str, str], render: Render
) -> Callable[[Sequence[str]], int]:
    return lambda words: render(target, *parse_render(target, words, environ))


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer's callback signature
    if value:
        typer.echo(f"distlaunch {distlaunch.__version__}")
        raise typer.Exit
