"""Run a model, hand every write and state of its stream to reducers as it is made, and check the books."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mainstem.errors import ConfigError, StreamNotFoundError
from mainstem.measure.events import Batch, BlockEvent, Reducer, SublayerEvent, Write
from mainstem.observe._frames import Frame, FrameTracker, own_arithmetic, unwrapped
from mainstem.observe._frozen import Call, is_inplace, version
from mainstem.observe._tail import Tail, TailRecorder
from mainstem.observe._trace import CallCounter, CallKey, function_name
from mainstem.observe.map import PathCall, Site, StreamMap, Value


@dataclasses.dataclass
class Books:
    """How well the books of one or more passes balance.

    Attributes:
        additivity: largest ``|after - (carried + writes)| / |after|`` over sites and real tokens; on a CPU
            and beyond some hundred tokens, of a quarter of the tokens, another quarter at each site.
        continuity: largest ``|taken - made| / |made|`` between what a site carries and what the site before
            left.
        additivity_site, continuity_site: where the largest was, -1 if all were zero.
        passes: how many passes were checked.
    """

    additivity: float = 0.0
    continuity: float = 0.0
    additivity_site: int = -1
    continuity_site: int = -1
    passes: int = 0

    def merge(self, other: Books) -> None:
        """Keep the worse errors of the two."""
        self.note_additivity(other.additivity, other.additivity_site)
        self.note_continuity(other.continuity, other.continuity_site)
        self.passes += other.passes

    def note_additivity(self, error: float, site: int) -> None:
        """Take in an additivity error; NaN is worse than any number."""
        if _is_worse(error, self.additivity):
            self.additivity, self.additivity_site = error, site

    def note_continuity(self, error: float, site: int) -> None:
        """Take in a continuity error; NaN is worse than any number."""
        if _is_worse(error, self.continuity):
            self.continuity, self.continuity_site = error, site


def _is_worse(error: float, known: float) -> bool:
    return not math.isnan(known) and not error <= known


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a recorded pass leaves behind.

    Attributes:
        output: what the model returned, bit-identical to a pass without recording.
        books: the largest errors found.
        tail: the model from its final state on (final norm, head, caps), to be applied to other states of the
            same shape; None where it was not asked for.
    """

    output: Any
    books: Books
    tail: Tail | None = None


def record(
    model: nn.Module,
    inputs: Mapping[str, Any],
    stream_map: StreamMap,
    reducers: Sequence[Reducer] = (),
    *,
    batch: Batch | None = None,
    keep_tail: bool = False,
) -> Recording:
    """Run ``model(**inputs)`` and hand the stream to ``reducers`` as it is produced.

    Nothing is held beyond the block in progress, so memory does not grow with depth. Gradients flow as they
    would without recording; wrap the call in ``torch.no_grad()`` for statistics. On exit, after an exception
    in a reducer too, no hook is left and none of the model's or the user's was touched.

    Args:
        model: the module that ``stream_map`` was found in.
        inputs: keyword arguments of its forward.
        stream_map: from :func:`mainstem.observe.find_stream`.
        reducers: what takes the events; see :class:`mainstem.measure.Reducer`.
        batch: which tokens are real; when not given, ``attention_mask`` says so, or all are.
        keep_tail: keep the model's end for a logit lens.

    Raises:
        StreamNotFoundError: the pass did not go through the sites of the map.
        ConfigError: ``batch`` has another shape than the stream.
    """
    model = unwrapped(model)
    tracker = FrameTracker(model)
    recorder = Recorder(stream_map, reducers, tracker, batch or batch_of(inputs), keep_tail=keep_tail)
    recorder.batch_is_given = batch is not None
    with torch.compiler.set_stance("force_eager"), tracker, recorder:
        recorder.note_inputs(inputs)
        output = model(**inputs)
    recorder.finish(type(model).__name__, output)
    tail = recorder.tail.close(output, stream_map.output) if recorder.tail is not None else None
    return Recording(output, recorder.books, tail)


def batch_of(inputs: Mapping[str, Any]) -> Batch:
    """Say which tokens of ``inputs`` are real: by ``attention_mask`` where it is given, all otherwise."""
    ids = next(
        (inputs[k] for k in ("decoder_input_ids", "input_ids") if isinstance(inputs.get(k), Tensor)), None
    )
    mask_name = (
        "decoder_attention_mask" if isinstance(inputs.get("decoder_input_ids"), Tensor) else "attention_mask"
    )
    mask = inputs.get(mask_name)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return Batch(mask=mask.bool(), token_ids=ids)
    if ids is not None:
        return Batch(mask=torch.ones_like(ids, dtype=torch.bool), token_ids=ids)
    return Batch(mask=torch.ones(0, 0, dtype=torch.bool))


class _Watch:
    """Which calls of a pass matter, by module call and function, so that all others cost one look-up."""

    def __init__(self, stream_map: StreamMap):
        self.functions: defaultdict[Frame, set[str]] = defaultdict(set)
        self.keys: set[CallKey] = set()
        self.joins: dict[CallKey, int] = {}
        self.thens: dict[CallKey, int] = {}
        for site in stream_map.sites:
            self.joins[site.join.call] = site.index
            if site.after.call != site.join.call:
                self.thens[site.after.call] = site.index
        self.exits: defaultdict[CallKey, list[Value]] = defaultdict(list)
        for value in stream_map.exits:
            self.exits[value.call].append(value)
            self.add(value.call)
        self.add(stream_map.sites[0].before.call)
        for site in stream_map.sites:
            for value in values_of(site):
                self.add(value.call)
                if value.made_by is not None:
                    self.add(value.made_by)

    def add(self, key: CallKey) -> None:
        """Watch one more call."""
        self.keys.add(key)
        self.functions[key.frame].add(key.function)


def values_of(site: Site) -> Iterable[Value]:
    """Return every tensor of a pass that a site is made of."""
    yield from (site.before, site.join, site.after, *site.carried)
    for write in site.writes:
        yield from write.values
    for call in (*site.carry_path, *site.then_path):
        yield from call.takes


class Recorder(TorchFunctionMode):
    """Watches the calls of one pass that a map names."""

    def __init__(
        self,
        stream_map: StreamMap,
        reducers: Sequence[Reducer],
        tracker: FrameTracker,
        batch: Batch,
        *,
        keep_tail: bool = False,
    ):
        super().__init__()
        self.map, self.reducers, self.batch, self.tracker = stream_map, reducers, batch, tracker
        self.batch_is_given = False
        self.books = Books(passes=1)
        self.tail = TailRecorder() if keep_tail else None
        self.watch = _Watch(stream_map)
        self._counter = CallCounter(tracker)
        self.calls: dict[CallKey, Call] = {}
        self._next = 0
        self._before: Tensor | None = None
        self._sublayers: list[SublayerEvent] = []

    def note_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Take an input that is itself the first state of the stream."""
        before = self.map.sites[0].before.call
        if before.function.startswith("input:"):
            self.calls[before] = Call.of_input(
                before.function, inputs[before.function.removeprefix("input:")]
            )

    # ---- every call ----

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        frame = self.tracker.current
        functions = self.watch.functions.get(frame)
        if functions is None or function_name(func) not in functions:
            return self._call(func, args, kwargs)
        key = self._counter.key(func, pytree.tree_leaves((args, kwargs)))
        if key not in self.watch.keys:
            return self._call(func, args, kwargs)
        if self._next < len(self.map.sites):
            return self._watched(key, func, args, kwargs)
        self._check_exit(key, args, kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.tail is not None and self.tail.is_open:
            return self.tail.call(func, args, kwargs)
        return func(*args, **kwargs)

    def _watched(
        self, key: CallKey, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if is_inplace(func):
            self._rescue(args[0])
        self.calls[key], out = Call.run(key.function, func, args, kwargs)
        with own_arithmetic():
            self.on_call(key)
            if key in self.watch.joins:
                self._join(self.map.sites[self.watch.joins[key]])
            if key in self.watch.thens:
                self._then(self.map.sites[self.watch.thens[key]])
        return out

    # ---- the books ----

    def _join(self, site: Site) -> None:
        if site.index != self._next or site.before.call not in self.calls:
            raise _other_path(site.index, self._next)
        self._check_continuity(site.index, site.carry_path, site.carried)
        before, after = self.value(site.before), self.value(site.join)
        if site.index == 0:
            self._fit_batch(before)
        if site.carry == "identity" and self.value(site.carried[0]) is not before:
            before = self.value(site.carried[0])  # the copy that was kept from an in-place join
        event = SublayerEvent(
            index=site.index,
            carried=self.stream_shaped(self._sum(site.carried)) if site.carried else None,
            writes=tuple(Write(w.kind, self.stream_shaped(self._sum(w.values))) for w in site.writes),
            after=self.stream_shaped(after),
        )
        if event.carried is not None and not any(v.is_remainder for w in site.writes for v in w.values):
            self._check_additivity(event)
        if self._before is None:
            self._before = self.stream_shaped(before)
        self._sublayers.append(event)
        self.on_join(site, event)
        if site.after.call == site.join.call:
            self._leave(site, after)

    def on_call(self, key: CallKey) -> None:
        """For subclasses."""

    def on_join(self, site: Site, event: SublayerEvent) -> None:
        """For subclasses."""

    def on_leave(self, site: Site) -> None:
        """For subclasses."""

    def _then(self, site: Site) -> None:
        if site.index != self._next:
            raise _other_path(site.index, self._next)
        self._check_continuity(site.index, site.then_path, ())
        self._leave(site, self.value(site.after))

    def _leave(self, site: Site, after: Tensor) -> None:
        """A sublayer is done; so may be its block."""
        self.on_leave(site)
        self._next = site.index + 1
        block = self.map.blocks[site.block]
        if self._next == block.end_site:
            assert self._before is not None
            event = BlockEvent(
                block=block.index,
                num_blocks=len(self.map.blocks),
                before=self._before,
                sublayers=tuple(self._sublayers),
                after=self.stream_shaped(after),
                batch=self.batch,
            )
            for reducer in self.reducers:
                reducer.update(event)
            self._before, self._sublayers = None, []
        self.calls = {site.after.call: self.calls[site.after.call]}
        if self.tail is not None and self._next == len(self.map.sites):
            self.tail.open(after)

    def _rescue(self, target: Tensor) -> None:
        """Copy what reducers have yet to see of a tensor that is about to be changed in place."""
        copies: dict[int, Tensor] = {}

        def safe(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
                return t
            return copies.setdefault(id(t), t.clone())

        if self._before is not None:
            self._before = safe(self._before)
        for i, event in enumerate(self._sublayers):
            self._sublayers[i] = SublayerEvent(
                index=event.index,
                carried=None if event.carried is None else safe(event.carried),
                writes=tuple(Write(w.kind, safe(w.value)) for w in event.writes),
                after=safe(event.after),
            )

    def _check_exit(self, key: CallKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make sure that the rest of the model takes up the final state itself."""
        values = self.watch.exits.pop(key, [])
        given = pytree.tree_leaves((args, kwargs))
        for value in values:
            taken = given[value.slot] if value.slot is not None and value.slot < len(given) else None
            if not isinstance(taken, Tensor):
                raise _other_path(self._next, self._next)
            self._check_final(taken)

    def _check_final(self, taken: Tensor) -> None:
        final = self.calls[self.map.final.call]
        same = taken is final.made[0]
        error = relative_error(taken, final.made[0], self.batch.mask)
        if same:
            error = 0.0 if version(taken) == final.made_versions[0] else float("inf")
        self.books.note_continuity(error, len(self.map.sites))

    def finish(self, model_name: str, output: Any) -> None:
        """Make sure that all sites were seen and the final state was taken up, and close the pass."""
        if self._next == len(self.map.sites) and not self.map.exits:
            leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
            named = output[self.map.output] if isinstance(output, Mapping) else leaves[0]
            self._check_final(named)
        if self._next == len(self.map.sites) and self.watch.exits:
            raise StreamNotFoundError(
                f"{model_name} did not take up the final state of its stream as it did when it was traced. "
                "Find the map again with inputs like these."
            )
        if self._next != len(self.map.sites):
            raise StreamNotFoundError(
                f"{model_name} went through {self._next} of the {len(self.map.sites)} sublayers of its "
                "map; it took "
                "another path than when it was traced. Find the map again with inputs like these."
            )
        for reducer in self.reducers:
            reducer.end_pass(self.batch)

    def _fit_batch(self, state: Tensor) -> None:
        """Make the batch fit the stream: without tokens of its own, all positions of the state are real.

        Raises:
            ConfigError: the caller gave a batch of another shape.
        """
        mask = self.batch.mask
        if state.shape[:2] == mask.shape or (mask.numel() and state.shape[0] == mask.numel()):
            return
        if self.batch_is_given:
            raise ConfigError(
                f"the batch's mask has shape {tuple(mask.shape)}, but the stream is "
                f"{tuple(state.shape)}; expected "
                f"{tuple(state.shape[:2])}, one entry a token."
            )
        self.batch = Batch(mask=torch.ones(state.shape[:2], dtype=torch.bool, device=state.device))

    def value(self, value: Value) -> Tensor:
        """Return a tensor of this pass.

        Raises:
            StreamNotFoundError: what the map takes for a tensor is none.
        """
        call = self.calls[value.call]
        if value.slot is None:
            found: Any = call.made[0]
        elif value.is_remainder:
            found = call.made[0] - call.leaves[0]
        else:
            found = call.leaves[value.slot] if value.slot < len(call.leaves) else None
        if not isinstance(found, Tensor):
            raise _other_path(self._next, self._next)
        return found

    def _sum(self, values: Sequence[Value]) -> Tensor:
        return sum_of([self.value(v) if v.sign > 0 else -self.value(v) for v in values])

    def stream_shaped(self, t: Tensor) -> Tensor:
        """Undo a flattening of batch and positions (OPT)."""
        mask = self.batch.mask
        if mask.numel() == 0 or t.shape[:2] == mask.shape:
            return t
        if t.shape[0] == mask.numel():
            return t.reshape(*mask.shape, *t.shape[1:])
        return t

    def _check_continuity(self, index: int, path: Sequence[PathCall], carried: Sequence[Value]) -> None:
        for value in (*(v for call in path for v in call.takes), *carried):
            if value.made_by is None or value.slot is None:
                continue
            if value.made_by not in self.calls or value.call not in self.calls:
                raise _other_path(index, self._next)
            error = self._continuity_error(self.calls[value.made_by], self.calls[value.call], value.slot)
            self.books.note_continuity(error, index)

    def _continuity_error(self, maker: Call, taker: Call, slot: int) -> float:
        """Return 0 where the very tensor that was made is taken, unchanged; infinity where it was changed in
        place."""
        taken = taker.given[slot]
        for made, made_version in zip(maker.made, maker.made_versions, strict=True):
            if made is taken:
                return 0.0 if made_version == taker.given_versions[slot] else float("inf")
        return min(relative_error(taker.leaves[slot], made, self.batch.mask) for made in maker.made)

    def _check_additivity(self, event: SublayerEvent) -> None:
        assert event.carried is not None
        terms = [event.carried, *(w.value for w in event.writes)]
        if _adds_up_exactly([t.detach() for t in terms], event.after.detach(), event.index):
            return
        error = relative_error(sum_of(terms), event.after, self.batch.mask)
        self.books.note_additivity(error, event.index)


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of one or more tensors, added in order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


_CHUNK_BYTES = 1 << 18


def _adds_up_exactly(terms: Sequence[Tensor], after: Tensor, site: int) -> bool:
    """Whether the terms, summed in order in their own dtype, are ``after`` to the bit.

    On a CPU, by chunks that stay in a core's cache, for a fresh sum of a whole state costs more than the
    rest; and of more than four chunks, every fourth, another fourth at the next site: what can go
    wrong with a sum (a term left out, a tensor changed behind its back) does so at every token.
    """
    if any(t.shape != after.shape for t in terms) or after.ndim < 3 or after.device.type != "cpu":
        return torch.equal(sum_of(terms), after)
    rows = max(1, _CHUNK_BYTES // max(1, after[0, 0].numel() * after.element_size()))
    pieces = list(zip(*(t.flatten(0, 1).split(rows) for t in (*terms, after)), strict=True))
    chosen = pieces if len(pieces) <= 4 else pieces[site % 4 :: 4]
    return all(torch.equal(sum_of(piece[:-1]), piece[-1]) for piece in chosen)


def _other_path(site: int, expected: int) -> StreamNotFoundError:
    return StreamNotFoundError(
        f"the pass reached sublayer {site} where {expected} was expected; the model took another path "
        "than when it "
        "was traced. Find the map again with inputs like these."
    )


def relative_error(given: Tensor, expected: Tensor, mask: Tensor) -> float:
    """Return the largest ``|given - expected| / |expected|`` over real tokens, norms over all but the first
    two dims.

    Computed in fp32, or fp64 where the tensors are. Infinite where shapes differ; NaN where a value is.
    """
    if given.shape != expected.shape:
        return float("inf")
    with torch.no_grad():
        wide = torch.promote_types(expected.dtype, torch.float32)
        a, b = given.to(wide), expected.to(wide)
        error, size = _norms(a - b, mask), _norms(b, mask)
        if error.numel() == 0:
            return 0.0
        return float((error / size.clamp_min(torch.finfo(wide).tiny)).max())


def _norms(t: Tensor, mask: Tensor) -> Tensor:
    t = t.flatten(2) if t.ndim > 2 else t.unsqueeze(0)
    norms = t.norm(dim=-1)
    return norms[mask] if mask.shape == norms.shape else norms.flatten()
