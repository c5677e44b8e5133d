"""Keep chosen states and writes of a pass, under TransformerLens point names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.measure.events import BlockEvent, Reducer
from mainstem.observe.record import sum_of

NameFilter = Callable[[str], bool]


class KeepStream(Reducer):
    """A reducer that holds copies of states and writes; the one reducer whose memory grows with depth.

    Names are those of TransformerLens: ``blocks.{i}.hook_resid_pre``, ``.hook_attn_out``,
    ``.hook_resid_mid``, ``.hook_mlp_out``, ``.hook_resid_post``. There is no ``hook_resid_mid`` in a block
    with one sublayer (parallel blocks, Mamba); a cross-attention's write is ``hook_cross_attn_out`` and the
    state after it ``hook_resid_mid2``.

    Args:
        names: which points to keep; all when not given.
    """

    def __init__(self, names: NameFilter | None = None):
        self.points: dict[str, Tensor] = {}
        self._names = names or _every

    def update(self, event: BlockEvent) -> None:
        """Copy the block's points."""
        prefix = f"blocks.{event.block}.hook_"
        self._keep(prefix + "resid_pre", event.before)
        for number, sublayer in enumerate(event.sublayers):
            for kind in dict.fromkeys(w.kind for w in sublayer.writes):
                self._keep(
                    f"{prefix}{kind}_out", sum_of([w.value for w in sublayer.writes if w.kind == kind])
                )
            if number + 1 < len(event.sublayers):
                mid = "resid_mid" if number == 0 else f"resid_mid{number + 1}"
                self._keep(prefix + mid, sublayer.after)
        self._keep(prefix + "resid_post", event.after)

    def merge(self, other: Self) -> None:
        """Refuse: tensors of two passes do not add up."""
        raise ConfigError(
            "KeepStream holds the tensors of one pass and cannot be merged; use a statistic instead."
        )

    def result(self) -> dict[str, Tensor]:
        """Return the points kept, by name, in order of production."""
        return self.points

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        """Return a point by full name, or by ``("resid_post", block)``; negative blocks are from the end."""
        if isinstance(key, tuple):
            name, block = key
            last = max((int(point.split(".")[1]) for point in self.points), default=-1)
            key = f"blocks.{block if block >= 0 else last + 1 + block}.hook_{name}"
        if key not in self.points:
            raise ConfigError(f"no point {key!r} was kept; kept are: {', '.join(self.points) or 'none'}.")
        return self.points[key]

    def _keep(self, name: str, value: Tensor) -> None:
        if self._names(name):
            self.points[name] = value.detach().clone()


def _every(name: str) -> bool:
    return True
