"""`mainstem convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mainstem.cli._options import DtypeOption, JsonOption, ModelArgument, RevisionOption, TrustOption
from mainstem.cli._terminal import output, stdout_kept_clean


def convert(
    model: ModelArgument,
    text: Annotated[
        str,
        typer.Option(help="File, folder, dataset name, or text:WORDS.", show_default=False, metavar="T"),
    ],
    out: Annotated[Path, typer.Option(help="New folder for the model.", show_default=False, metavar="DIR")],
    connection: Annotated[
        str | None,
        typer.Option(help="What to convert to: `mainstem connections`.", show_default=False, metavar="NAME"),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="How an mHC is laid out: paper, deepseek_v4 or megatron.", show_default=False, metavar="NAME"
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="Of the connection, such as num_streams=2.", metavar="KEY=VALUE"),
    ] = None,
    stream_dtype: Annotated[
        str, typer.Option(help="Least dtype of the stream: float32, or auto to follow the branches.")
    ] = "float32",
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use.", metavar="N")] = 1024,
    window: Annotated[int, typer.Option(help="Tokens in a window.", metavar="N")] = 256,
    batch_size: Annotated[int, typer.Option(help="Windows in a forward pass.", metavar="N")] = 2,
    first_token: Annotated[
        str, typer.Option(help="What every window begins with: none, bos, eos, or a token's own text.")
    ] = "none",
    tolerance: Annotated[
        float, typer.Option(help="Largest logit difference at which the function counts as kept.")
    ] = 1e-3,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Save also where the function is not kept.")
    ] = False,
    dtype: DtypeOption = "float32",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give MODEL another residual connection that computes the same, prove it on a text, and save it.

    What is saved loads by AutoModelForCausalLM.from_pretrained once mainstem.tower.hf is imported.
    """
    from mainstem.report.convert import conversion_lines
    from mainstem.surgery import ConvertConfig, check_out, save_conversion
    from mainstem.surgery.convert import convert as run
    from mainstem.training.arguments import options as parse

    config = ConvertConfig(
        model=model,
        connection=connection,
        layout=layout,
        text=text,
        options=parse(options or [], "--set"),
        stream_dtype=None if stream_dtype == "auto" else stream_dtype,
        tokens=tokens,
        window=window,
        batch_size=batch_size,
        first_token=first_token,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        tolerance=tolerance,
        allow_change=allow_change,
    )
    check_out(out, model)
    with stdout_kept_clean():
        conversion = run(config)
        save_conversion(conversion, out)
    with output():
        if as_json:
            print(json.dumps(conversion.record, indent=1))
        else:
            print("\n".join([*conversion_lines(conversion.record), f"wrote {out}"]))
