"""Write the table of ``docs/convert.md``: which connections keep a pretrained function.

    python -m benchmarks.convert_table

A small Llama with nothing left at its initial value is converted to every scheme in fp64, where what is not
kept cannot be mistaken for rounding.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from mainstem.connections import make_scheme, scheme_names
from mainstem.surgery import convert_tower
from mainstem.tower import Tower, TowerConfig

PAGE = Path(__file__).parents[1] / "docs" / "convert.md"
MARKS = ("<!-- table: python -m benchmarks.convert_table -->", "<!-- end of table -->")
KEPT = 1e-12
"""fp64 rounds at 1.1e-16; what is kept is at most 1e-14 away, what is not 0.1."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of a function in one scheme.

    Attributes:
        name: the scheme.
        distance: largest logit difference over the largest logit.
        new: parameters that the source has not, a block.
        first, later: of these tensors, the share with a gradient in the first step, and by the third.
        why: what stands in the way, for a scheme that has no exact start.
    """

    name: str
    distance: float
    new: float
    first: float
    later: float
    why: str

    @property
    def kept(self) -> bool:
        """Whether the function is the same but for rounding."""
        return self.distance <= KEPT


def source() -> Tower:
    """Return a tower of four Llama blocks whose every weight, norms included, is drawn."""
    torch.manual_seed(0)
    config = TowerConfig(vocab_size=97, width=48, num_blocks=4, num_heads=4, num_kv_heads=2, ffn_width=80)
    tower = Tower(config).double().eval()
    for parameter in tower.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return tower


def token_ids() -> torch.Tensor:
    """Return two sequences of 24 tokens."""
    return torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))


def measure(tower: Tower, name: str) -> Row:
    """Convert to one scheme and see."""
    ids = token_ids()
    torch.manual_seed(0)
    converted, changes = convert_tower(tower, name)
    with torch.no_grad():
        expected = tower(ids)
        distance = float((converted(ids) - expected).abs().max() / expected.abs().max())
    named = dict(converted.named_parameters())
    new = [named[key] for key in changes["new"] if key in named]
    reached = _reached(converted, new)
    return Row(
        name=name,
        distance=distance,
        new=sum(parameter.numel() for parameter in new) / tower.config.num_blocks,
        first=len(reached[0]) / len(new) if new else 1.0,
        later=len(set.union(*reached)) / len(new) if new else 1.0,
        why=make_scheme(name).no_exact_start or "",
    )


def _reached(tower: Tower, parameters: list[nn.Parameter]) -> list[set[int]]:
    """Return which parameters have a gradient, one above rounding, in each of three steps."""
    ids, found = token_ids(), list[set[int]]()
    tower.train()
    optimizer = torch.optim.SGD(tower.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(tower(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        sizes = [0.0 if p.grad is None else float(p.grad.abs().max()) for p in tower.parameters()]
        own = [0.0 if p.grad is None else float(p.grad.abs().max()) for p in parameters]
        found.append({i for i, size in enumerate(own) if size > KEPT * max(sizes)})
        optimizer.step()
    return found


def rows() -> list[Row]:
    """Return all schemes, what is kept first."""
    tower = source()
    return sorted((measure(tower, name) for name in scheme_names()), key=lambda row: (not row.kept, row.name))


def table(found: list[Row]) -> str:
    """Return the Markdown between the marks."""
    lines = [
        MARKS[0],
        "",
        f"{sum(row.kept for row in found)} of {len(found)} schemes keep it.",
        "",
        "| connection | keeps the function | distance | new parameters a block | gradient, first step "
        "| by the third | what stands in the way |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        shares = [f"{share:.0%}" if row.new else "" for share in (row.first, row.later)]
        cells = [
            f"`{row.name}`",
            "yes" if row.kept else "no",
            "0" if row.kept else f"{row.distance:.2g}",
            f"{row.new:,.0f}",
            *shares,
            "" if row.kept else row.why,
        ]
        lines.append("| " + " | ".join(cells).replace("  ", " ") + " |")
    return "\n".join([*lines, "", MARKS[1]])


def main() -> None:
    """Put the table in its place on the page."""
    text = PAGE.read_text("utf-8")
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    PAGE.write_text(before + table(rows()) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
