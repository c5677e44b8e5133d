"""Arguments and options that several verbs take."""

from __future__ import annotations

from typing import Annotated

import typer

ModelArgument = Annotated[
    str, typer.Argument(help="Hub id, folder, .gguf file, or 'smollm2'.", show_default=False, metavar="MODEL")
]
DtypeOption = Annotated[
    str, typer.Option(help="float32, float64, bfloat16, float16, or auto (the checkpoint's).")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, ...; auto spreads the model, tp shares its weights between torchrun's processes."
    ),
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let a hub model run Python code of its own.")
]
