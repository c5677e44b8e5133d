"""`mainstem diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mainstem.cli._options import DtypeOption, JsonOption, TrustOption
from mainstem.cli._terminal import output, stdout_kept_clean


def diff(
    a: Annotated[
        str, typer.Argument(help="Hub id, folder, .gguf file, or 'smollm2'.", show_default=False, metavar="A")
    ],
    b: Annotated[str, typer.Argument(help="The model that came of it.", show_default=False, metavar="B")],
    text: Annotated[
        str,
        typer.Option(help="File, folder, dataset name, or text:WORDS.", show_default=False, metavar="T"),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for diff.json and diff.csv.", show_default="none", metavar="DIR"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use.", metavar="N")] = 2048,
    window: Annotated[int, typer.Option(help="Tokens in a window.", metavar="N")] = 256,
    batch_size: Annotated[int, typer.Option(help="Windows in a forward pass.", metavar="N")] = 1,
    first_token: Annotated[
        str, typer.Option(help="What every window begins with: none, bos, eos, or a token's own text.")
    ] = "none",
    dtype: DtypeOption = "float32",
    revision_a: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of A.", show_default=False)
    ] = None,
    revision_b: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of B.", show_default=False)
    ] = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Lay two models side by side on a text: which blocks write otherwise, and what it does to loss.

    A and B are a model before and after pruning, converting or fine-tuning, or two checkpoints of a training.
    """
    from mainstem.report import plain_console
    from mainstem.report.diff import FILES, diff_to_json, print_diff, write_diff
    from mainstem.report.files import check_folder
    from mainstem.surgery.diff import DiffConfig
    from mainstem.surgery.diff import diff as run

    if out is not None:
        check_folder(out, FILES)
    config = DiffConfig(
        a=a,
        b=b,
        text=text,
        tokens=tokens,
        window=window,
        batch_size=batch_size,
        first_token=first_token,
        dtype=dtype,
        revision_a=revision_a,
        revision_b=revision_b,
        trust_remote_code=trust_remote_code,
    )
    with stdout_kept_clean():
        result = run(config)
        files = [] if out is None else write_diff(result, out)
    with output():
        if as_json:
            print(diff_to_json(result), end="")
        else:
            print_diff(result, plain_console())
            for path in files:
                print(f"wrote {path}")
