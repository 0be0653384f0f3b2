"""Join the commands. Errors are printed as sentences, and exit with status 1.

An error of a stage or a worker is printed with its traceback before, unless it is one of penstock. `penstock --help`
imports the module of every command, so a command imports its own dependencies inside its function.
"""

from __future__ import annotations

import signal
import sys
from traceback import format_exception
from typing import Annotated

import typer

from .. import __version__
from .._pipeline.errors import PenstockError, StageFailed
from .._pipeline.util.printing import printable
from .diagnose import diagnose
from .doctor import doctor
from .export import export
from .gateway import gateway
from .init import init
from .launch import launch
from .plot import plot
from .replay import replay
from .report import report
from .run import check, run
from .samples import samples
from .top import top
from .worker import worker

commands = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


def _say_version(asked: bool) -> None:  # noqa: FBT001 (called by typer)
    if asked:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@commands.callback()
def penstock(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Bring trajectories from reinforcement-learning environments to a trainer."""
    del version


for command in (
    init,
    run,
    check,
    replay,
    worker,
    top,
    samples,
    report,
    plot,
    diagnose,
    export,
    doctor,
    gateway,
    launch,
):
    commands.command()(command)


def main() -> None:
    """Run a command."""
    try:
        commands(prog_name="penstock")
    except StageFailed as error:
        reason, _, in_worker = str(error).partition("\n\n")
        sys.stderr.write(in_worker or _traceback(error.__cause__))
        sys.exit(f"penstock: {printable(reason)}")
    except (PenstockError, OSError) as error:
        sys.exit(f"penstock: {printable(str(error))}")
    finally:
        _leave_ctrl_c_to_the_kernel()


def _traceback(cause: BaseException | None) -> str:
    """Return the traceback of an exception; empty for an error of penstock, whose message says it all."""
    return "" if cause is None or isinstance(cause, PenstockError) else "".join(format_exception(cause))


def _leave_ctrl_c_to_the_kernel() -> None:
    """Have Ctrl-C end this process without a traceback: its work is done, and it is about to exit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
