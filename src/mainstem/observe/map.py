"""The map of a model's residual stream: its states, and the sites where something joins it."""

from __future__ import annotations

import dataclasses

from mainstem.observe._flow import REMAINDER, CarryKind
from mainstem.observe._trace import CallKey


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of a pass: an argument of a call, its output (``slot`` None), or what a fused add adds.

    Attributes:
        call: the call.
        slot: which flattened argument; None for the output; ``REMAINDER`` for output minus first argument.
        sign: -1.0 where the addition subtracts it.
        made_by: for an argument, the call that made it, if one did.
    """

    call: CallKey
    slot: int | None = None
    sign: float = 1.0
    made_by: CallKey | None = None

    @property
    def is_remainder(self) -> bool:
        """Whether the value is never a tensor of its own."""
        return self.slot == REMAINDER


@dataclasses.dataclass(frozen=True)
class PathCall:
    """One call on the way of what is carried: linear in the arguments ``takes`` when all others are
    frozen."""

    call: CallKey
    takes: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class WriteSite:
    """One write of a sublayer.

    Attributes:
        kind: ``"attn"``, ``"cross_attn"``, ``"mlp"``, ``"mixer"`` or ``"other"``.
        module: path of the module in which it was worked out.
        values: the arguments of the addition that make it up (usually one).
    """

    kind: str
    module: str
    values: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Site:
    """One sublayer: ``after_join = carried + writes``.

    Attributes:
        index: 0-based number among all sublayers.
        block: 0-based number of its block.
        carry: ``"identity"``, ``"scale"``, ``"norm"`` or ``"mix"`` by what the carried part goes through
            between the state and the addition; ``"none"`` where the sublayer replaces the stream.
        before: the state that enters.
        carried: arguments of the addition that carry.
        writes: what is added.
        join: the sum.
        after: the state that leaves: the sum, or the sum normed or scaled (Post-LN).
        then: what happens to the sum on its way to ``after``: ``"identity"``, ``"scale"``, ``"norm"`` or
            ``"mix"``.
        carry_path: the calls between ``before`` and ``carried``; ``then_path``: between ``join`` and
            ``after``.
    """

    index: int
    block: int
    carry: CarryKind
    before: Value
    carried: tuple[Value, ...]
    writes: tuple[WriteSite, ...]
    join: Value
    after: Value
    then: CarryKind = "identity"
    carry_path: tuple[PathCall, ...] = ()
    then_path: tuple[PathCall, ...] = ()


@dataclasses.dataclass(frozen=True)
class BlockMap:
    """One block: a half-open range of sites.

    Attributes:
        index: 0-based number.
        module: path of the module.
        call: how-many-th call of that module (0 but for models that apply one block many times).
        first_site, end_site: its sites are ``sites[first_site:end_site]``.
    """

    index: int
    module: str
    call: int
    first_site: int
    end_site: int


@dataclasses.dataclass(frozen=True)
class StreamMap:
    """Where a model's residual stream is.

    Attributes:
        source: the token embedding, or what a projection makes of it or of a float input.
        front: constant tensors added before the first block, such as position embeddings.
        front_path: the calls from the source to the first state.
        sites: all sublayers, in order.
        blocks: all blocks, in order.
        num_streams: 1, or n for a model that carries ``[batch, pos, n, width]``.
        width: size of the last dimension of one stream.
        exits: arguments through which the rest of the model takes up the final state; empty where it is the
            output.
        output: which output of the model the flow was followed to, such as ``"logits"``.
        notes: what a reader should know, in sentences.
    """

    source: Value
    front: tuple[Value, ...]
    front_path: tuple[PathCall, ...]
    sites: tuple[Site, ...]
    blocks: tuple[BlockMap, ...]
    exits: tuple[Value, ...]
    num_streams: int
    width: int
    output: str
    notes: tuple[str, ...] = ()

    @property
    def final(self) -> Value:
        """The state after the last block, before any final norm."""
        return self.sites[-1].after

    def names(self) -> dict[str, str]:
        """Map TransformerLens point names to module paths (with the call number where a module is called
        again)."""
        found: dict[str, str] = {"hook_embed": self.source.call.frame.path}
        for block in self.blocks:
            path = block.module if block.call == 0 else f"{block.module}#{block.call}"
            prefix = f"blocks.{block.index}"
            found[f"{prefix}.hook_resid_pre"] = path
            sites = self.sites[block.first_site : block.end_site]
            for site in sites:
                for write in site.writes:
                    found[f"{prefix}.hook_{write.kind}_out"] = write.module
            for number in range(1, len(sites)):
                found[f"{prefix}.hook_resid_mid{number if number > 1 else ''}"] = path
            found[f"{prefix}.hook_resid_post"] = path
        return found

    def describe(self) -> str:
        """Return the map as a table for people."""
        streams = f", {self.num_streams} streams" if self.num_streams > 1 else ""
        lines = [
            f"{len(self.blocks)} blocks, {len(self.sites)} sublayers, width {self.width}{streams}, to "
            f"{self.output}"
        ]
        for block in self.blocks:
            sites = self.sites[block.first_site : block.end_site]
            what = "; ".join(
                f"{' + '.join(w.kind for w in s.writes)} (carry: "
                f"{s.carry}{'' if s.then == 'identity' else f', then {s.then}'})"
                for s in sites
            )
            lines.append(f"{block.index:4d}  {block.module}  {what}")
        return "\n".join([*lines, *self.notes])
