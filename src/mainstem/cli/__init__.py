"""The command: a file a verb or two; each parses, calls and prints."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from mainstem import __version__
from mainstem.errors import MainstemError, MissingExtraError

try:
    import rich as rich
    import typer
except ImportError as missing:  # the core installs without them; the command says how to get them
    print(
        f"mainstem: {MissingExtraError('The command', str(missing.name).partition('.')[0], 'hf')}",
        file=sys.stderr,
    )
    raise SystemExit(1) from None

from mainstem.cli._audit import audit
from mainstem.cli._check import check
from mainstem.cli._convert import convert
from mainstem.cli._diff import diff
from mainstem.cli._inspect import connections, inspect
from mainstem.cli._prune import prune
from mainstem.cli._report import report
from mainstem.cli._terminal import INTERRUPTED, Interrupted, drop_stdout
from mainstem.cli._train import compare, train

__all__ = ["INTERRUPTED", "app", "main"]

app = typer.Typer(
    name="mainstem",
    help="Audit the residual stream of deep transformers, with books that balance.",
    epilog="Example:  mainstem audit smollm2 --text README.md --out out/smollm2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print versions for a bug report.")] = False,
) -> None:
    if version:
        import platform

        import torch

        print(f"mainstem {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command(epilog="Example:  mainstem audit smollm2 --text README.md --out out/smollm2")(audit)
app.command(epilog="Example:  mainstem report out/smollm2/audit.json --out smollm2.html")(report)
app.command(epilog="Example:  mainstem inspect smollm2")(inspect)
app.command(epilog="Example:  mainstem connections")(connections)
app.command(
    epilog="Example:  mainstem convert smollm2 --connection mhc --text README.md --out out/smollm2-mhc"
)(convert)
app.command(epilog="Example:  mainstem diff smollm2 out/smollm2-mhc --text README.md")(diff)
app.command(
    epilog="Example:  mainstem prune smollm2 --blocks 3 --text README.md --eval-text sotu --out out/short"
)(prune)
app.command(epilog="Example:  mainstem check my_package.models:build --depths 2,8,24")(check)
app.command(
    epilog="Example:  mainstem train --depth 96 --width 64 --connection mhc --max_steps 500 --out out/mhc96",
    context_settings=_PASSED_ON,
)(train)
app.command(
    epilog="Example:  mainstem compare --connections pre_norm,mhc --depths 12,24 --seeds 3 --max_steps 300 "
    "--out out/mhc",
    context_settings=_PASSED_ON,
)(compare)


def main() -> None:
    """Run the command: a user's mistake ends in one sentence and status 1, an interruption in 130."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except MainstemError as error:
        print(f"mainstem: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:  # typer turns Ctrl-C into this, and says nothing
            says = (
                leaving.says if isinstance(leaving, Interrupted) else "interrupted; no file is half written."
            )
            print(f"mainstem: {says}", file=sys.stderr)
        raise
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        drop_stdout()
        raise SystemExit(1) from None
