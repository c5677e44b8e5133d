"""Changes a model's stream at the calls that its map names."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mainstem.errors import ConfigError, StreamNotFoundError
from mainstem.intervene.kinds import Intervention, Place, Skip
from mainstem.observe import Site, StreamMap, Value
from mainstem.observe._frames import Frame, FrameTracker
from mainstem.observe._frozen import is_inplace
from mainstem.observe._trace import CallCounter, CallKey, function_name

OnState: TypeAlias = Callable[[int, Tensor], None]
"""Told of a state: its number (``l``: before block ``l``) and its tensor, which must not be changed."""


class PassTracker(FrameTracker):
    """A tracker that begins anew at every outermost module call, so that a context may hold many passes."""

    def __init__(self, model: nn.Module, begin: Callable[[], None], end: Callable[[], None]):
        super().__init__(model, around=True)
        self._begin, self._end = begin, end

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._stack:
            self._calls.clear()
            self._begin()
        super()._enter(module, args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        whole = len(self._stack) == 1 and self._stack[0].path == ""
        super()._leave(module, args, output)
        if whole and output is not None:  # None: the pass broke off, and says why itself
            self._end()


@dataclasses.dataclass
class Edits:
    """What is to be done at one call.

    Attributes:
        writes: the terms of changed writes that the call takes or makes, each with its write.
        after: changes of the output, in order.
        seen: told of the output, changed.
    """

    writes: list[tuple[Value, _Write]] = dataclasses.field(default_factory=list)
    after: list[Callable[[Tensor], Tensor]] = dataclasses.field(default_factory=list)
    seen: list[Callable[[Tensor], None]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Write:
    """A write under intervention: its terms, those met so far in the pass, and what is done to their sum."""

    place: Place
    terms: tuple[Value, ...]
    interventions: list[Intervention]
    met: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def by_term(self) -> bool:
        return all(one.scales for one in self.interventions)

    def changed(self, value: Tensor) -> Tensor:
        for one in self.interventions:
            value = one.apply(value, self.place)
        return value

    def term(self, value: Tensor, sign: float, shaped: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what takes the place of the next term, in its own shape."""
        if self.by_term or len(self.terms) == 1:
            change = shaped(value) if sign > 0 else -shaped(value)
            change = self.changed(change)
            return (change if sign > 0 else -change).reshape(value.shape)
        self.met.append(shaped(value) if sign > 0 else -shaped(value))
        if len(self.met) < len(self.terms):
            return value
        total = torch.stack(self.met).sum(0)
        delta = (self.changed(total) - total).reshape(value.shape)
        return value + delta if sign > 0 else value - delta


class InterveneMode(TorchFunctionMode):
    """Runs every call as it is, but those that an intervention names.

    Args:
        model: where the map was found.
        stream_map: its map.
        interventions: what is done; several at one place are done in order.
        on_state: told of every state as it is after all changes.

    Raises:
        ConfigError: a block or part that the model does not have, or an intervention that is not defined
            there.
    """

    def __init__(
        self,
        model: nn.Module,
        stream_map: StreamMap,
        interventions: Sequence[Intervention],
        on_state: OnState | None = None,
    ):
        super().__init__()
        self.map = stream_map
        self.tracker = PassTracker(model, self._begin, self._end)
        self.edits: defaultdict[CallKey, Edits] = defaultdict(Edits)
        self._writes: dict[tuple[int, str], _Write] = {}
        self._before: dict[str, Tensor] = {}
        self._lead: tuple[int, int] | None = None
        self._on_state = on_state
        self.optional: set[CallKey] = set()
        for one in interventions:
            for block in one.blocks:
                self._place(one, block)
        self._watch_states({b for one in interventions for b in one.blocks})
        self._functions: defaultdict[Frame, set[str]] = defaultdict(set)
        for key in self.edits:
            self._functions[key.frame].add(key.function)
        self._begin()

    # ---- where ----

    def _place(self, one: Intervention, block: int) -> None:
        if not 0 <= block < len(self.map.blocks):
            raise ConfigError(f"block {block} is not one of the model's {len(self.map.blocks)} (0-based).")
        sites = self.map.sites[self.map.blocks[block].first_site : self.map.blocks[block].end_site]
        if one.part == "block":
            self._around(one, block, sites[0], sites[-1])
            return
        if one.part == "state":
            edit = _state_edit(one, block)
            self.edits[sites[-1].after.call].after.append(lambda t: self._shaped_edit(t, edit))
            return
        kinds = sorted({w.kind for site in sites for w in site.writes})
        if one.part != "writes" and one.part not in kinds:
            raise ConfigError(f"block {block} has no {one.part!r}; it has {', '.join(kinds)}.")
        for site in sites:
            for write in site.writes:
                if one.part in ("writes", write.kind):
                    self._at_write(one, block, site, write.kind)

    def _at_write(self, one: Intervention, block: int, site: Site, kind: str) -> None:
        plain = site.carry == "identity" and site.then == "identity"
        if isinstance(one, Skip) and not plain:
            if len(site.writes) > 1:
                raise ConfigError(
                    f"skipping {kind!r} alone in block {block} is not defined: its sublayer also writes "
                    f"{', '.join(w.kind for w in site.writes if w.kind != kind)}, and changes the stream it "
                    "carries. Use Zero, or skip the block."
                )
            self._around(one, block, site, site)
            return
        values = next(w.values for w in site.writes if w.kind == kind)
        place = Place(block, kind, site.index - self.map.blocks[block].first_site)
        known = self._writes.setdefault((site.index, kind), _Write(place, values, []))
        if not known.interventions:
            for value in values:
                self.edits[value.call].writes.append((value, known))
        known.interventions.append(one)

    def _around(self, one: Intervention, block: int, first: Site, last: Site) -> None:
        """Change the update from the state before a site to the state after another."""
        name = f"block {block}" if one.part == "block" else f"site {first.index}"
        if first.before.call.function.startswith("input:"):
            raise ConfigError(
                f"the stream enters {name} as an input of the model itself; intervene on its writes instead."
            )
        self._keep_before(name, first)
        place = Place(block, one.part)

        def change(after: Tensor) -> Tensor:
            before = self._before[name]
            if before.shape != after.shape:
                raise ConfigError(
                    f"{name} changes the shape of the stream, from {list(before.shape)} to "
                    f"{list(after.shape)}: its update is not defined. Intervene on its writes instead."
                )
            if one.part == "block":
                return one.apply_update(before, after, place)
            return self._shaped_edit(after, lambda t: one.apply_update(self._shaped(before), t, place))

        self.edits[last.after.call].after.append(change)

    def _keep_before(self, name: str, site: Site) -> None:
        def keep(state: Tensor) -> None:
            self._before[name] = state.clone()  # it may be changed in place by the sublayer

        self.edits[site.before.call].seen.append(keep)

    def _watch_states(self, blocks: set[int]) -> None:
        """Note the shape of batch and positions at every block that is changed, and hand out states."""
        first = self.map.sites[0].before.call
        if self._on_state is not None:
            self.edits[first].seen.append(lambda state: self._show(0, state))
            for block in self.map.blocks:
                after = self.map.sites[block.end_site - 1].after.call
                self.edits[after].seen.append(lambda state, n=block.index + 1: self._show(n, state))
        for block in blocks:
            key = self.map.sites[self.map.blocks[block].first_site].before.call
            if not key.function.startswith("input:"):
                self.edits[key].seen.append(self._note_lead)

    def _show(self, number: int, state: Tensor) -> None:
        self._note_lead(state)
        assert self._on_state is not None
        self._on_state(number, state)

    def _note_lead(self, state: Tensor) -> None:
        if state.ndim >= 3:
            self._lead = (state.shape[0], state.shape[1])

    def note_entry(self, block: int, state: Tensor) -> None:
        """Take in the state that enters a block, where it is not the one that was made in this pass."""
        self._note_lead(state)
        for name in (f"block {block}", f"site {self.map.blocks[block].first_site}"):
            self._before[name] = state.clone()

    def allow_missing(self, blocks: range) -> None:
        """Do not expect the calls of blocks that are passed over in this pass."""
        for block in blocks:
            for site in self.map.sites[self.map.blocks[block].first_site : self.map.blocks[block].end_site]:
                self.optional |= {site.before.call, site.join.call, site.after.call}

    # ---- every call ----

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        functions = self._functions.get(self.tracker.current)
        if functions is None or function_name(func) not in functions:
            return func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = self._counter.key(func, leaves)
        edits = self.edits.get(key)
        if edits is None:
            return func(*args, **kwargs)
        self._missing.discard(key)
        if any(value.slot is not None and not value.is_remainder for value, _ in edits.writes):
            self._change_arguments(func, leaves, edits)
            args, kwargs = cast(tuple[tuple[Any, ...], dict[str, Any]], pytree.tree_unflatten(leaves, spec))
        carried = leaves[0].clone() if any(value.is_remainder for value, _ in edits.writes) else None
        return self._change_output(func, func(*args, **kwargs), edits, carried)

    def _change_arguments(self, func: Callable[..., Any], leaves: list[Any], edits: Edits) -> None:
        for value, write in edits.writes:
            if value.slot is None or value.is_remainder:
                continue
            found = leaves[value.slot] if value.slot < len(leaves) else None
            if not isinstance(found, Tensor):
                raise _other_path()
            new = write.term(found, value.sign, self._shaped)
            if value.slot == 0 and is_inplace(func):  # others may hold the tensor that is added to
                found.copy_(new)
            else:
                leaves[value.slot] = new

    def _change_output(self, func: Callable[..., Any], out: Any, edits: Edits, carried: Tensor | None) -> Any:
        if not isinstance(out, Tensor):
            raise _other_path()
        new, copies = out, is_inplace(func)
        whole = [(v, w) for v, w in edits.writes if v.slot is None or v.is_remainder]
        if copies and (whole or edits.after):
            new = out.clone()
        for value, write in whole:
            if value.is_remainder:
                assert carried is not None
                new = carried + write.term(new - carried, value.sign, self._shaped)
            else:
                new = write.term(new, value.sign, self._shaped)
        for change in edits.after:
            new = change(new)
        for see in edits.seen:
            see(new)
        if copies and new is not out:
            return out.copy_(new)
        return new

    # ---- shapes ----

    def _shaped(self, t: Tensor) -> Tensor:
        """Undo a flattening of batch and positions (OPT); let a batch of one stand for all (position
        embeddings)."""
        if self._lead is not None and t.ndim == 2 and t.shape[0] == self._lead[0] * self._lead[1]:
            return t.reshape(*self._lead, t.shape[-1])
        return t

    def _shaped_edit(self, t: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return change(self._shaped(t)).reshape(t.shape)

    # ---- a pass ----

    def _begin(self) -> None:
        self._counter = CallCounter(self.tracker)
        self._missing = {k for k in self.edits if not k.function.startswith("input:")} - self.optional
        self._before = {}
        for write in self._writes.values():
            write.met.clear()

    def _end(self) -> None:
        if self._missing:
            raise _other_path()


def _state_edit(one: Intervention, block: int) -> Callable[[Tensor], Tensor]:
    return lambda state: one.apply(state, Place(block, "state"))


def _other_path() -> StreamNotFoundError:
    return StreamNotFoundError(
        "the pass did not go through the sites of an intervention; the model took another path than when it "
        "was traced. Find the map again with inputs like these."
    )
