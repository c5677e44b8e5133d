"""`mainstem audit`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mainstem.cli._options import DeviceOption, DtypeOption, JsonOption, RevisionOption, TrustOption
from mainstem.cli._terminal import output, progress, stdout_kept_clean
from mainstem.errors import MainstemError

if TYPE_CHECKING:
    from mainstem.audit import AuditConfig


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
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Skip every block in turn, and measure the damage and the loss."),
    ] = False,
    sweep_windows: Annotated[int, typer.Option(help="Windows that --sweep uses.", metavar="N")] = 4,
    only: Annotated[
        str | None,
        typer.Option(
            help="Questions to answer, of books, growth, writes, identity, answer, damage, removal, signals; "
            "damage and removal imply --sweep.",
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
        sweep=sweep,
        sweep_windows=sweep_windows,
        only=tuple(name.strip() for name in only.split(",")) if only else (),
        trust_remote_code=trust_remote_code,
    )
    if model is None:
        _audit_twins(config, out or (None if as_json else Path("audit-twins")), as_json=as_json)
        return
    folder = out or (None if as_json else Path(f"audit-{Path(model).expanduser().resolve().name}"))
    if folder is not None:
        check_folder(folder)
    with stdout_kept_clean(), progress() as tell:
        result = run_audit(config, tell)
    files = write_files(result, folder) if folder is not None else []
    with output():
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
    with stdout_kept_clean(), progress() as tell:
        results = {name: run_audit(dataclasses.replace(config, model=name), tell) for name in TWINS}
    files = [path for name, place in places.items() for path in write_files(results[name], place)]
    with output():
        if as_json:
            print(f"[{','.join(to_json(result) for result in results.values())}]")
            return
        print_pair(results, plain_console())
        for path in files:
            print(f"wrote {path}")
