"""Find the residual stream of any PyTorch model from its data flow, without a line of per-model code."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.errors import StreamNotFoundError
from mainstem.observe._flow import REMAINDER, Leaf, Link, dominators, links, path_kind, relevant_nodes
from mainstem.observe._frames import Frame, unwrapped
from mainstem.observe._kinds import kind_of, module_of
from mainstem.observe._rules import Status
from mainstem.observe._sharded import communicates_in_forward
from mainstem.observe._trace import Node, Trace, carries, trace
from mainstem.observe.map import BlockMap, PathCall, Site, StreamMap, Value, WriteSite

PROBE_TOKENS = 11
"""Positions the tracing pass looks at; odd, so that no other dimension is likely to have that size."""
PROBE_SEQUENCES = 2
FUSED_NOTE = (
    "PyTorch runs its own encoder layers and attention as one fused call in eval mode; recorded, they run "
    "their own formula, so that outputs differ by rounding (1e-5 in fp32) from those without recording"
)
"""Why the outputs of a model with ``nn.TransformerEncoderLayer`` or ``nn.MultiheadAttention`` may differ."""
_INSTEAD = (
    "A mainstem tower is asked through its connections: by `mainstem audit` on its own, and by "
    "mainstem.observe.tower_map with record_tower, tower_ledger and tower_streams."
)


def find_stream(model: nn.Module, inputs: Mapping[str, Any], *, source: str | None = None) -> StreamMap:
    """Find the residual stream of ``model`` by running it once on a few tokens.

    Every torch call is recorded; the dominators of the data flow between the embedding and the output are the
    states of the stream (every path passes through them); between two of them lies one sublayer.

    Args:
        model: any ``nn.Module``; it is run as it is (train or eval), without gradients, random state left
            alone.
        inputs: keyword arguments of ``model``; at most 2 sequences of 11 positions of them are used.
        source: name of the input whose stream is wanted, for a model with two (``"input_features"`` or
            ``"decoder_input_ids"``); the one with the most sublayers when not given.

    Returns:
        The map.

    Raises:
        StreamNotFoundError: no chain of states was found, with what was seen instead.
    """
    model = unwrapped(model)
    _refuse_sharded(model)
    with torch.compiler.set_stance("force_eager"):
        seen = trace(model, probe(inputs))
    sink, output = _sink(seen, model)
    best: _Chain | None = None
    for candidate in _sources(seen, sink, source):
        chain = _Chain.follow(seen, candidate, sink)
        if best is None or chain.num_joins > best.num_joins:
            best = chain
    if best is None:
        raise StreamNotFoundError(
            f"no tensor flows from the inputs ({', '.join(inputs)}) of {type(model).__name__} to its "
            "output; expected "
            "an embedding of the token ids or a float input of 3 dimensions. Pass the inputs its "
            "forward() takes."
        )
    found = _MapBuilder(seen, best, output).build(type(model).__name__)
    if any(isinstance(m, nn.TransformerEncoderLayer | nn.MultiheadAttention) for m in model.modules()):
        found = dataclasses.replace(found, notes=(*found.notes, FUSED_NOTE))
    return found


def _refuse_sharded(model: nn.Module) -> None:
    """Refuse shares of tensors but those of a ``tp_plan`` and of FSDP, which gathers them before use."""
    if any(hasattr(m, "unshard") for m in model.modules()):
        return
    shared = [
        (name, module)
        for name, module in model.named_modules()
        if any(hasattr(p, "full_tensor") for p in module.parameters(recurse=False))
    ]
    for name, module in shared:
        if not communicates_in_forward(module):
            raise StreamNotFoundError(
                f"processes share the weights of {name or 'the model'} ({type(module).__name__}) in a way "
                "that is not known: what it makes is put together out of sight of its calls. Load the model "
                "with tp_plan='auto', or spread it over the devices of one process with device_map='auto' "
                "(--device auto)."
            )
    if shared and "sequence_parallel" in (getattr(model, "tp_plan", None) or {}).values():
        raise StreamNotFoundError(
            f"the tp_plan of {type(model).__name__} divides the stream's positions between processes "
            "('sequence_parallel'), so that none holds the stream. Use a plan without it."
        )


def probe(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Cut token inputs to the few sequences and positions that a tracing pass needs.

    Integer and bool tensors and masks of two dimensions are cut in both; float inputs in the batch alone.
    """

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        value = value[:PROBE_SEQUENCES]
        if value.ndim == 2 and value.shape[1] > PROBE_TOKENS:
            value = value[:, -PROBE_TOKENS:] if not value.is_floating_point() else value
        return value.clone()

    return {name: cut(value) for name, value in inputs.items()}


def _sink(seen: Trace, model: nn.Module) -> tuple[int, str]:
    """Return the node that made the model's main output, and the output's name."""
    result = seen.result
    named: dict[str, Any] = dict(result) if isinstance(result, Mapping) else {}
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        if isinstance(named.get(name), Tensor):
            return seen.maker.get(id(named[name]), -1), name
    leaves: list[Any] = list(named.values()) or (
        list(result) if isinstance(result, tuple | list) else [getattr(result, "logits", result)]
    )
    for value in leaves:
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.ndim >= 2
            and id(value) in seen.maker
        ):
            return seen.maker[id(value)], "output"
    raise StreamNotFoundError(
        f"{type(model).__name__} returned {type(result).__name__} without a float tensor of 2 or more "
        "dimensions; "
        "expected logits or hidden states, as a tensor, in a tuple, or under 'logits' or 'last_hidden_state'."
    )


def _sources(seen: Trace, sink: int, wanted: str | None) -> list[int]:
    """Return the nodes where a stream may begin: look-ups of the ids given, and float inputs; best guesses
    first."""
    inputs = {n.key.function.removeprefix("input:"): n for n in seen.nodes if n.name.startswith("input:")}
    ids = {name: n.output for name, n in inputs.items() if "ids" in name and not n.output.is_floating_point()}
    exact: list[int] = []
    other: list[int] = []
    for node in seen.nodes[: sink + 1]:
        lookup = node.name == "embedding" or (
            node.name == "getitem" and id(node.inputs[0][1]) in seen.parameters
        )
        index = next((t for _, t, _ in node.inputs if not t.is_floating_point()), None)
        if lookup and index is not None and node.output.is_floating_point():
            same = [name for name, t in ids.items() if t.shape == index.shape and torch.equal(t, index)]
            if wanted is None or wanted in same:
                (exact if same else other).append(node.index)
    floats = [
        n.index
        for name, n in inputs.items()
        if n.output.is_floating_point() and n.output.ndim >= 2 and wanted in (None, name)
    ]
    return exact + floats + other


@dataclasses.dataclass
class _Chain:
    """The dominators from one source to the sink, and the links between them."""

    states: list[Node]
    links: list[Link]

    @classmethod
    def follow(cls, seen: Trace, source: int, sink: int) -> _Chain:
        nodes = relevant_nodes(seen, source, sink)
        states = dominators(nodes)
        return cls(states, links(nodes, states))

    @property
    def num_joins(self) -> int:
        return sum(link.kind == "join" for link in self.links)


class _MapBuilder:
    """Turns a chain into sites and blocks."""

    def __init__(self, seen: Trace, chain: _Chain, output: str):
        self.seen, self.chain, self.output = seen, chain, output
        self.container = self._find_container()
        self.notes: list[str] = []

    # ---- which module is a block ----

    def _find_container(self) -> str | None:
        """Return the path of the module list whose numbered members are the blocks, or None."""
        covered: defaultdict[str, int] = defaultdict(int)
        frames: defaultdict[str, set[Frame]] = defaultdict(set)
        for link in self.chain.links:
            if link.kind == "local":
                continue
            for frame in link.end.stack:
                head, _, last = frame.path.rpartition(".")
                if last.isdigit():
                    covered[head] += 1
                    frames[head].add(frame)
        if not covered:
            return None
        return max(covered, key=lambda head: (covered[head], len(frames[head]), -len(head)))

    def block_frame(self, node: Node) -> Frame | None:
        """Return the block call in which ``node`` was made, or None."""
        if self.container is None:
            return None
        for frame in node.stack:
            head, _, last = frame.path.rpartition(".")
            if head == self.container and last.isdigit():
                return frame
        return None

    def child(self, node: Node) -> str:
        """Return the name of the block's child module in which ``node`` was made ('' for the block
        itself)."""
        block = self.block_frame(node)
        path = node.key.frame.path
        if block is None:
            return path
        return path[len(block.path) + 1 :].split(".")[0]

    # ---- sites ----

    def build(self, model_name: str) -> StreamMap:
        """Return the finished map."""
        pieces = self._pieces()
        if not pieces or any(self._spans_blocks(piece) for piece in pieces):
            self._refuse(model_name)
        self._refuse_gates(model_name, pieces)
        shape = pieces[0].state.output.shape
        sites: list[Site] = []
        frames: list[Frame | None] = []
        for i, piece in enumerate(pieces):
            following = pieces[i + 1].state if i + 1 < len(pieces) else self._last_state(piece)
            sites.append(self._site(i, piece, following))
            frames.append(self.block_frame(piece.links[-1].end))
        blocks, sites = _group(sites, frames)
        first = self.chain.states.index(pieces[0].state)
        before = self.chain.links[:first]
        while any(link.kind == "opaque" for link in before):  # a projection of the embedding (ALBERT, ViT)
            before = before[1:]
        streams = shape[2] if len(shape) == 4 else 1
        if before:
            self._note_copies(before[0].start.output.shape, shape)
        self._note_unmapped()
        return StreamMap(
            source=Value((before[0].start if before else pieces[0].state).key),
            front=tuple(self._value(leaf) for link in before for leaf in link.constant),
            front_path=self._path(before),
            sites=tuple(sites),
            blocks=tuple(blocks),
            exits=self._exits(self._last_state(pieces[-1])),
            num_streams=streams,
            width=shape[-1],
            output=self.output,
            notes=tuple(self.notes),
        )

    def _note_copies(self, embedding: torch.Size, state: torch.Size) -> None:
        """Note streams that lie side by side in the last dimension."""
        copies, rest = divmod(state[-1], embedding[-1])
        if embedding[:-1] == state[:-1] and copies > 1 and not rest:
            self.notes.append(
                f"the state begins as {copies} copies of the embedding, {embedding[-1]} wide, side by side"
            )

    def _note_unmapped(self) -> None:
        """Note blocks that hold no state: an earlier one is used again after them."""
        frames = [[self.block_frame(node) for node in link.nodes] for link in self.chain.links]
        with_state = {self.block_frame(state) for state in self.chain.states}
        missed = {frame.path for inside in frames for frame in inside if frame and frame not in with_state}
        if missed:
            self.notes.append(
                f"{len(missed)} blocks are left out, from {min(missed, key=_by_number)} on: they work on "
                "more than one tensor"
            )

    def _pieces(self) -> list[_Piece]:
        """Cut the chain into sublayers: every join, and every run of opaque links inside one module of a
        block.

        Where something outside a block replaces the stream (a decoder that reads an encoder), or something
        gives it another shape, another begins; the one with the most sublayers is meant.
        """
        streams: list[list[_Piece]] = [[]]
        run: list[Link] = []
        chain = self.chain.links
        for i, link in enumerate(chain):
            pieces = streams[-1]
            if link.kind == "opaque" and not self._is_sublayer(link):
                streams.append([])
                run = []
                continue
            if link.kind == "join":
                if run:  # what replaced the stream has another shape, such as a merging of patches
                    streams.append([])
                streams[-1].append(_Piece(link.start, [link]))
                run = []
                continue
            if link.kind == "opaque":
                run.append(link)
            if not run or not self._is_sublayer(link):
                run = run if self._is_sublayer(link) else []
                continue
            after = chain[i + 1] if i + 1 < len(chain) else None
            goes_on = (
                after is not None
                and after.kind != "join"
                and self.block_frame(after.end) == self.block_frame(link.end)
                and self.child(after.end) == self.child(link.end)
            )
            if not goes_on and self._has_stream_shape(link.end, pieces):
                pieces.append(_Piece(self._state_before(run, pieces), run))
                run = []
        longest = max(streams, key=len)
        if others := sum(len(stream) for stream in streams) - len(longest):
            self.notes.append(
                f"{others} sublayers belong to other streams, before or after this one, and are left out"
            )
        return longest

    def _spans_blocks(self, piece: _Piece) -> bool:
        """Whether one member of a module list works on what another made, with no state of the stream
        between."""
        for link in piece.links:
            block = self.block_frame(link.end)
            inside = f"{block.path}." if block is not None else ""
            members: defaultdict[str, dict[int, Frame]] = defaultdict(dict)
            for node in link.nodes:
                for frame in node.stack:
                    head, _, last = frame.path.rpartition(".")
                    if last.isdigit() and not (inside and head.startswith(inside)):
                        members[head][node.index] = frame
            for frames in members.values():
                later = [index for index, frame in frames.items() if frame != next(iter(frames.values()))]
                if later and any(
                    frames.get(n.index, frames[later[0]]) != frames[later[0]]
                    for n in link.ancestors(later[0])
                ):
                    return True
        return False

    def _is_sublayer(self, link: Link) -> bool:
        """Whether a link lies in a block (in a model without numbered blocks, any link may)."""
        return self.container is None or self.block_frame(link.end) is not None

    def _has_stream_shape(self, node: Node, pieces: list[_Piece]) -> bool:
        reference = pieces[-1].state if pieces else self._stream_start()
        return node.output.shape == reference.output.shape

    def _stream_start(self) -> Node:
        """Return the last state before any block."""
        before = self.chain.states[0]
        for state in self.chain.states:
            if self.block_frame(state) is not None or self.container is None:
                break
            before = state
        return before

    def _state_before(self, run: list[Link], pieces: list[_Piece]) -> Node:
        """Return the state that a sublayer without residual starts from.

        A norm before it belongs to what it reads, unless it lies in the block before.
        """
        if not pieces:
            return self._front_end(run[0])
        end = pieces[-1].links[-1].end
        same_block = self.block_frame(end) == self.block_frame(run[-1].end)
        return end if same_block else self._last_state(pieces[-1])

    def _front_end(self, link: Link) -> Node:
        return self._stream_start() if self.container is not None else link.start

    def _last_state(self, piece: _Piece) -> Node:
        """Return the state after the last sublayer: past norms that its own block applies to the stream."""
        end = piece.links[-1].end
        block = self.block_frame(end)
        for link in self.chain.links[self.chain.states.index(end) :]:
            if link.kind != "local" or block is None or self.block_frame(link.end) != block:
                break
            end = link.end
        return end

    def _exits(self, final: Node) -> tuple[Value, ...]:
        """Return the arguments through which the tail takes up the final state."""
        after = [n for link in self.chain.links[self.chain.states.index(final) :] for n in link.nodes]
        return tuple(
            Value(node.key, slot, made_by=final.key)
            for node in after
            for slot, t, maker in node.inputs
            if maker == final.index and carries(t)
        )

    def _site(self, index: int, piece: _Piece, following: Node) -> Site:
        link = piece.links[-1]
        before, join = Value(piece.state.key), Value(link.end.key)
        if link.kind == "join":
            carry = {n.index: n for leaf in link.carried for n in link.linear_path(leaf.maker)}
            then = self._links_between(link.end, following)
            then_calls = [n for one in then for n in one.linear_path(one.end.index)]
            return Site(
                index,
                block=-1,
                carry=link.carry_kind,
                before=before,
                carried=tuple(self._value(leaf) for leaf in link.carried),
                writes=self._writes(link),
                join=join,
                after=Value(following.key),
                then=path_kind(then_calls, [n for one in then for n in one.nodes]),
                carry_path=tuple(self._path_call(n, link.status) for n in carry.values()),
                then_path=self._path(then),
            )
        nodes = [n for one in piece.links for n in one.nodes]
        status = {k: v for one in piece.links for k, v in one.status.items()}
        kind = kind_of(nodes, status, self.child(link.end), self._positions())
        write = WriteSite(kind, module_of(nodes, status, self.block_frame(link.end)), (join,))
        return Site(index, -1, "none", before, (), (write,), join, join)

    def _links_between(self, start: Node, end: Node) -> list[Link]:
        states = self.chain.states
        return self.chain.links[states.index(start) : states.index(end)]

    def _path(self, steps: list[Link]) -> tuple[PathCall, ...]:
        """Return the carrying calls of consecutive local links."""
        return tuple(
            self._path_call(n, link.status) for link in steps for n in link.linear_path(link.end.index)
        )

    def _path_call(self, node: Node, status: dict[int, Status]) -> PathCall:
        takes = [
            Value(node.key, slot, made_by=self.seen.nodes[maker].key)
            for slot, t, maker in node.inputs
            if carries(t) and status.get(maker) in (Status.LINEAR, Status.JOINED)
        ]
        return PathCall(node.key, tuple(takes))

    def _value(self, leaf: Leaf) -> Value:
        made_by = self.seen.nodes[leaf.maker].key if leaf.maker >= 0 and leaf.slot != REMAINDER else None
        return Value(leaf.node.key, leaf.slot, leaf.sign, made_by)

    def _writes(self, link: Link) -> tuple[WriteSite, ...]:
        """Return the writes of a join, those of one kind together."""
        found: dict[str, list[tuple[Leaf, str]]] = {}
        block = self.block_frame(link.end)
        for leaf in link.written:
            nodes = link.ancestors(leaf.maker)
            module = module_of(nodes, link.status, block)
            kind = kind_of(nodes, link.status, module.rpartition(".")[2], self._positions())
            found.setdefault(kind, []).append((leaf, module))
        if link.constant:
            found.setdefault("other", []).extend((leaf, link.end.key.frame.path) for leaf in link.constant)
        return tuple(
            WriteSite(kind, leaves[0][1], tuple(self._value(leaf) for leaf, _ in leaves))
            for kind, leaves in found.items()
        )

    def _positions(self) -> int:
        shape = self._stream_start().output.shape
        return shape[1] if len(shape) > 1 else 0

    def _refuse_gates(self, model_name: str, pieces: list[_Piece]) -> None:
        """Refuse a stream that is replaced only to the eye: it goes on, but not as the term of a sum."""
        for link in (link for piece in pieces for link in piece.links):
            where = f"the residual stream of {model_name}, at {link.end.key.frame.path or 'its top'},"
            if link.kind == "opaque" and link.status[link.end.index] is Status.JOINED:
                raise StreamNotFoundError(
                    f"{where} goes on in something that is no sum of stream and write ({link.end.name}): a "
                    "gate (Highway, GRU), an interpolation (nGPT), an erasure (delta), or a norm of several "
                    "states (bottom-to-top). A data flow cannot tell there what was carried from what was "
                    f"written. {_INSTEAD}"
                )
            if len(link.written) > 1 and any(link.maps_state(leaf) for leaf in link.written):
                raise StreamNotFoundError(
                    f"{where} is carried and, in the same sum, multiplied by a matrix (LAuReL). A data flow "
                    f"cannot tell whether that matrix carries or writes. {_INSTEAD}"
                )

    def _refuse(self, model_name: str) -> None:
        size = max((len(link.nodes) for link in self.chain.links), default=0)
        raise StreamNotFoundError(
            f"no residual stream was found in {model_name}: of {len(self.chain.states)} tensors that every "
            f"path from the embedding to {self.output!r} passes, no two in a row have just one sublayer of "
            f"one block between them; the longest stretch without such a tensor holds {size} calls. A model "
            "whose sublayers read the outputs of many earlier ones (depth attention, dense connections), "
            "whose blocks each read the embedding again (per-layer inputs: Gemma 3n, Gemma 4), or that adds "
            "it again after its last block, has no single state between its blocks and cannot be mapped. "
            f"{_INSTEAD} If it keeps one cache tensor for all blocks (RWKV), pass "
            "use_cache=False."
        )


def _by_number(path: str) -> int:
    return int(path.rpartition(".")[2])


@dataclasses.dataclass
class _Piece:
    """One sublayer: the state it starts from, and the links it is made of."""

    state: Node
    links: list[Link]


def _group(sites: list[Site], frames: list[Frame | None]) -> tuple[list[BlockMap], list[Site]]:
    """Number the blocks: by the module call, or, where there are no numbered modules, by the order of
    kinds."""
    blocks: list[BlockMap] = []
    numbered: list[Site] = []
    seen_kinds: set[str] = set()
    for site, frame in zip(sites, frames, strict=True):
        kinds = {w.kind for w in site.writes}
        if frame is not None:
            new = not blocks or (blocks[-1].module, blocks[-1].call) != (frame.path, frame.call)
        else:
            new = not blocks or bool(kinds & seen_kinds) or "attn" in kinds or blocks[-1].call >= 0
        if new:
            path = frame.path if frame is not None else site.writes[0].module
            blocks.append(
                BlockMap(len(blocks), path, frame.call if frame else -1, site.index, site.index + 1)
            )
            seen_kinds = set()
        seen_kinds |= kinds
        blocks[-1] = dataclasses.replace(blocks[-1], end_site=site.index + 1)
        numbered.append(dataclasses.replace(site, block=blocks[-1].index))
    return [dataclasses.replace(b, call=max(b.call, 0)) for b in blocks], numbered
