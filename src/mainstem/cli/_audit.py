"""`mainstem audit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mainstem.cli._options import DeviceOption, DtypeOption, JsonOption, RevisionOption, TrustOption
from mainstem.cli._terminal import Interrupted, output, progress, stdout_kept_clean
from mainstem.errors import MainstemError

if TYPE_CHECKING:
    from mainstem.audit import AuditConfig, Resume


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
        str, typer.Option(help="Tokens of the text to use, or all.", metavar="N or all")
    ] = "2048",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for audit.json, audit.csv and report.html.",
            show_default="audit-MODEL",
            metavar="DIR",
        ),
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
    probe: Annotated[
        bool, typer.Option("--probe", help="Fit linear probes of token identity; takes a while.")
    ] = False,
    attribute: Annotated[
        str | None,
        typer.Option(
            help="Token whose logit after the first window is attributed to every write, or A,B for a "
            "difference.",
            show_default="the two best",
            metavar="TOKEN",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin again where an interrupted audit would be gone on with.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html: every answer with its charts.")
    ] = True,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Audit MODEL on a text: do the books balance, how does the stream grow, what does each block write.

    Without MODEL: two towers of 96 blocks side by side, one with residuals and one without, on text they were
    not trained on.

    An interrupted audit goes on where it was when the same command is given again. Several processes share
    the text, or with --device tp the weights: torchrun --nproc-per-node N -m mainstem audit ...
    """
    from mainstem.audit import AuditConfig
    from mainstem.sources import TWINS

    if model is not None and text is None:
        raise MainstemError(f"An audit of {model!r} needs a text: --text FILE, or --text text:'some words'.")
    config = AuditConfig(
        model=model or TWINS[0],
        text=text or "sotu-held-out",
        tokens=_number_of(tokens),
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
        probe=probe,
        attribute=attribute,
        trust_remote_code=trust_remote_code,
    )
    name = "twins" if model is None else Path(model).expanduser().resolve().name
    folder = out or (None if as_json else Path(f"audit-{name}"))
    page = folder / "report.html" if report and folder is not None else None
    configs = {"": config} if model else {n: dataclasses.replace(config, model=n) for n in TWINS}
    _audit_and_show(configs, folder, fresh=fresh, as_json=as_json, page=page)


def _number_of(tokens: str) -> int | None:
    """Return how many tokens are meant, None for all of them.

    Raises:
        MainstemError: neither a number nor "all".
    """
    if tokens == "all":
        return None
    try:
        return int(tokens) or None
    except ValueError:
        raise MainstemError(f"--tokens is {tokens!r}; give a number, or all.") from None


def _audit_and_show(
    configs: Mapping[str, AuditConfig],
    folder: Path | None,
    *,
    fresh: bool,
    as_json: bool,
    page: Path | None,
) -> None:
    """Audit one model, or several side by side, whose files go into folders of these names.

    The page of all is written last: whatever may go wrong with it, the figures are safe.
    """
    from mainstem.audit import Resume, joined, run_audit
    from mainstem.report import (
        check_folder,
        check_page,
        make_report,
        plain_console,
        print_pair,
        print_result,
        to_json,
        write_files,
        write_html,
    )

    places = {name: folder / name for name in configs} if folder is not None else {}
    for place in places.values():
        check_folder(place)
    if page is not None:
        check_page(page)
    kept = {name: Resume(place, fresh=fresh) for name, place in places.items()}
    with joined(next(iter(configs.values())).device) as ranks:
        try:
            with stdout_kept_clean(), nullcontext() if ranks.rank else progress() as tell:
                results = {n: run_audit(config, tell, resume=kept.get(n)) for n, config in configs.items()}
        except KeyboardInterrupt:
            raise Interrupted(_how_to_go_on(list(kept.values()))) from None
        if ranks.rank:
            return
        files = [path for name, place in places.items() for path in write_files(results[name], place)]
        for resume in kept.values():
            resume.remove()
        if page is not None:
            files.append(write_html(make_report([result.to_dict() for result in results.values()]), page))
    with output():
        if as_json:
            whole = [to_json(result) for result in results.values()]
            print(whole[0] if len(whole) == 1 else f"[{','.join(whole)}]\n", end="")
            return
        if len(results) == 1:
            print_result(next(iter(results.values())), plain_console())
        else:
            print_pair(results, plain_console())
        for path in files:
            print(f"wrote {path}")


def _how_to_go_on(kept: Sequence[Resume]) -> str:
    begun = [resume for resume in kept if resume.done]
    if not begun:
        return "interrupted; no file is half written."
    return (
        f"interrupted; the same command goes on after batch {begun[-1].done}, and with --fresh it begins "
        "again."
    )
