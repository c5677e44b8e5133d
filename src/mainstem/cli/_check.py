"""`mainstem check`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mainstem.cli._options import JsonOption
from mainstem.cli._terminal import output, progress, stdout_kept_clean
from mainstem.errors import MainstemError


def check(
    factory: Annotated[
        str,
        typer.Argument(
            help="package.module:factory or path/to/file.py:factory, a callable that takes a depth and gives "
            "a causal model or a mainstem.check.ResidualStack. Importing it runs its code.",
            show_default=False,
            metavar="FACTORY",
        ),
    ],
    depths: Annotated[str, typer.Option(help="Depths to build it for.", metavar="N,N,...")] = "2,4,8,16,24",
    tokens: Annotated[int, typer.Option(help="Positions in a sequence.", metavar="N")] = 12,
    width: Annotated[
        int | None, typer.Option(help="Passed to the factory as width=N.", show_default=False, metavar="N")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Checks to run, such as future-leak,growth.", metavar="CHECK,...")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check somebody's model or residual connection: leaks, growth, sums, gradients, and what should agree.

    Status 0: no finding. 1: at least one. 2: it could not be checked.
    """
    from mainstem.check import KINDS, CheckConfig, load_factory, parse_depths
    from mainstem.check import check as run_check
    from mainstem.report import check_to_json, plain_console, print_check

    try:
        with stdout_kept_clean(), progress() as tell:
            kinds = tuple(only.split(",")) if only is not None else tuple(KINDS)
            config = CheckConfig(depths=parse_depths(depths), tokens=tokens, width=width, kinds=kinds)
            report = run_check(load_factory(factory), config, name=factory, tell=tell)
    except MainstemError as error:
        print(f"mainstem: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    with output():
        if as_json:
            print(check_to_json(report), end="")
        else:
            print_check(report, plain_console())
    raise typer.Exit(1 if report.findings else 0)
