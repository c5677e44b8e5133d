"""`mainstem prune`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mainstem.cli._options import DtypeOption, JsonOption, ModelArgument, RevisionOption, TrustOption
from mainstem.cli._terminal import Interrupted, output, progress, stdout_kept_clean


def prune(
    model: ModelArgument,
    text: Annotated[
        str,
        typer.Option(help="Calibration: what the planners see.", show_default=False, metavar="T"),
    ],
    eval_text: Annotated[
        str, typer.Option(help="Held out: what plans are judged on.", show_default=False, metavar="T")
    ],
    blocks: Annotated[int | None, typer.Option(help="How many to remove.", metavar="N")] = None,
    loss_budget: Annotated[
        float | None, typer.Option(help="Or: as many as cost at most this, nats a token, held out.")
    ] = None,
    speed_up: Annotated[
        float | None, typer.Option(help="Or: until forward passes are this many times as fast.")
    ] = None,
    planner: Annotated[
        str, typer.Option(help="Whose choice is taken: influence, angular, single, greedy, beam.")
    ] = "beam",
    compare: Annotated[
        str, typer.Option(help="Whose curves are drawn besides: names with commas, all, or none.")
    ] = "all",
    unit: Annotated[str, typer.Option(help="block, attention, or feed_forward.")] = "block",
    out: Annotated[
        Path | None,
        typer.Option(help="New folder for the model; without it nothing is saved.", metavar="DIR"),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="File for the curves.", metavar="FILE")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the calibration text.", metavar="N")] = 2048,
    eval_tokens: Annotated[int, typer.Option(help="Tokens of the held-out text.", metavar="N")] = 2048,
    window: Annotated[int, typer.Option(help="Tokens in a window.", metavar="N")] = 256,
    batch_size: Annotated[int, typer.Option(help="Windows in a forward pass.", metavar="N")] = 8,
    first_token: Annotated[
        str, typer.Option(help="What every window begins with: none, bos, eos, or a token's own text.")
    ] = "none",
    cache_gib: Annotated[float, typer.Option(help="Most memory for held states.", metavar="GIB")] = 4.0,
    rounds: Annotated[int, typer.Option(help="Rounds of timing.", metavar="N")] = 5,
    dtype: DtypeOption = "float32",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove blocks of MODEL by what their absence costs, judged on text that no planner has seen."""
    from mainstem.report.files import check_file, write_text
    from mainstem.report.prune import curves_csv, prune_lines
    from mainstem.surgery import PLANNERS, check_out, save_pruned
    from mainstem.surgery.prune import PruneConfig
    from mainstem.surgery.prune import prune as run

    names = {"all": tuple(PLANNERS), "none": ()}.get(compare)
    config = PruneConfig(
        model=model,
        text=text,
        eval_text=eval_text,
        num=blocks,
        loss_budget=loss_budget,
        speed_up=speed_up,
        planner=planner,
        planners=tuple(compare.split(",")) if names is None else names,
        unit=cast(Any, unit),
        tokens=tokens,
        eval_tokens=eval_tokens,
        window=window,
        batch_size=batch_size,
        first_token=first_token,
        cache_bytes=int(cache_gib * 2**30),
        rounds=rounds,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    if out is not None:
        check_out(out, model)
    if csv is not None:
        check_file(csv)
    with stdout_kept_clean(), progress() as told:
        found = run(config, told, lambda one: print(one.describe(), file=sys.stderr))
        if out is not None and found.model is not None:
            told("saving", 0, 1)
            save_pruned(found.model, found.tokenizer, out, found.origin, found.record)
    if csv is not None:
        write_text(csv, curves_csv(found.record))
    written = [str(one) for one in (out if found.model is not None else None, csv) if one is not None]
    with output():
        if as_json:
            print(json.dumps(found.record, indent=1, ensure_ascii=False, allow_nan=False))
        else:
            print("\n".join([*prune_lines(found.record), *(f"wrote {one}" for one in written)]))
    if not found.record["finished"]:
        raise Interrupted("interrupted; the curves are as far as they came, and no model was saved.")
