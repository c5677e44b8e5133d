"""Results for a terminal: a table by block and a sentence a question."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mainstem.audit import AuditResult, BlockFigures


def print_result(result: AuditResult, console: Console) -> None:
    """Print the table by block, then what was found."""
    stream, model, text = (result.provenance[k] for k in ("stream", "model", "text"))
    console.print(
        f"[bold]{model['requested']}[/bold] ({model['architecture']}, {model['num_parameters']:,} "
        "parameters, "
        f"{model['dtype']}): {stream['num_blocks']} blocks, width {stream['width']}"
        + (f", {stream['num_streams']} streams" if stream["num_streams"] > 1 else ""),
        highlight=False,
    )
    console.print(
        f"{text['num_tokens']:,} tokens of {text['text']['name']} in {text['num_windows']} windows; "
        f"{text['first_token_policy']}",
        highlight=False,
        style="dim",
    )
    console.print(_table(result))
    if result.loss is not None:
        console.print(
            f"loss {result.loss.nll:.4f} nats a token (perplexity {result.loss.perplexity:.2f}) over "
            f"{result.loss.tokens:,} tokens",
            highlight=False,
        )
    for finding in result.findings:
        console.print(f"[bold]{finding.number} {finding.question}[/bold] {finding.finding}", highlight=False)


def _table(result: AuditResult) -> Table:
    kinds = [
        (f"{kind}_write_ratio", head)
        for kind, head in (
            ("attn", "attn/h"),
            ("cross_attn", "cross/h"),
            ("mlp", "mlp/h"),
            ("mixer", "mixer/h"),
        )
        if any(getattr(b, f"{kind}_write_ratio") is not None for b in result.blocks)
    ]
    has_lens = any(b.lens_kl is not None for b in result.blocks)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    heads = ["block", "norm", "first", *(head for _, head in kinds), "cos", "infl.", "angle", "largest", "at"]
    for head in [*heads, *(["lens KL", "top-1"] if has_lens else [])]:
        table.add_column(head, justify="right", no_wrap=True)
    largest = {o.block: o for o in result.outliers}
    for block in result.blocks:
        outlier = largest.get(block.block)
        table.add_row(
            str(block.block),
            _short(block.resid_norm_median),
            _short(block.resid_norm_first),
            *(_fixed(getattr(block, name)) for name, _ in kinds),
            _fixed(block.write_cosine),
            _fixed(block.block_influence, 4),
            _fixed(block.angular_distance_next, 4),
            _short(block.max_abs) + ("*" if outlier is not None and outlier.massive else " "),
            f"{outlier.position}:{outlier.channel}" if outlier is not None else "-",
            *_lens(block, has_lens),
        )
    return table


def _lens(block: BlockFigures, has_lens: bool) -> list[str]:
    return [_fixed(block.lens_kl, 2), _fixed(block.lens_top1)] if has_lens else []


def _fixed(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def _short(value: float) -> str:
    if value != value:
        return "nan"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
