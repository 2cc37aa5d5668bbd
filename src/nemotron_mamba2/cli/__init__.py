"""The command line: `generate`, `inspect`, `explain`, `quantize`, `bench`.

Text goes to stdout as it comes; progress and figures go to stderr, and progress only to a terminal. Whatever the user
got wrong is one line on stderr and exit code 2; Ctrl-C is 130; a reader that closes the pipe is no error. torch and
the rest of the package are imported by the command that needs them, so that `--help` answers at once. There is one
module per group of commands.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import click

from ..errors import NemotronMamba2Error
from . import bench, generate, inspect, quantize
from .shared import DEMO_MODEL, memory_bytes, size

__all__ = ["DEMO_MODEL", "commands", "main", "memory_bytes", "size"]

PROGRAM = "nemotron-mamba2"
EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141


@click.group(
    no_args_is_help=False, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="nemotron-mamba2", prog_name=PROGRAM)
@click.pass_context
def commands(context: click.Context) -> None:
    """Run NVIDIA Nemotron-H models: hybrids of Mamba-2, attention, MLP and MoE layers."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (generate.command, inspect.inspect_command, inspect.explain_command, quantize.command, bench.command):
    commands.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns: the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        with warnings.catch_warnings(), commands.make_context(PROGRAM, words) as context:
            warnings.showwarning = _show_warning
            commands.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else PROGRAM
        return _fail(f"{error.format_message()} (see {where} --help)")
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, and must not meet the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (click.ClickException, NemotronMamba2Error, OSError) as error:
        return _fail(error.format_message() if isinstance(error, click.ClickException) else str(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo(err=True)
        return EXIT_INTERRUPTED
    return 0


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"{PROGRAM}: warning: {' '.join(str(message).split())}", err=True)


def _fail(message: str) -> int:
    """One line, whatever the message looks like."""
    click.echo(f"{PROGRAM}: {' '.join(message.split())}", err=True)
    return EXIT_USAGE
