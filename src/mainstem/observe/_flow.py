"""From a data flow to the chain of states every token must pass, and what lies between two of them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

from torch import Tensor

from mainstem.observe._rules import (
    CONTRACTION,
    FUSED_ADDS,
    JOINS,
    NORMS,
    SHAPE,
    SIZES,
    Status,
    status_of_call,
)
from mainstem.observe._trace import Node, Trace, carries

CarryKind = Literal["identity", "scale", "norm", "mix", "none"]
REMAINDER = -1


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An argument of an addition: what is carried or written.

    Attributes:
        node: the addition.
        slot: which flattened argument of it; ``REMAINDER`` for what a fused add adds to its first argument.
        maker: index of the node that made the argument, -1 if none did.
        sign: 1.0, or -1.0 where it is subtracted.
    """

    node: Node
    slot: int
    maker: int
    sign: float

    @property
    def tensor(self) -> Tensor:
        """The argument, as it was after the pass."""
        return next(t for slot, t, _ in self.node.inputs if slot == self.slot)


@dataclasses.dataclass(frozen=True)
class Link:
    """What lies between two consecutive dominators.

    Attributes:
        kind: ``"join"`` (something carried plus something written), ``"local"`` (the state norm-ed, scaled,
            cast, or with a constant added; nothing learned), or ``"opaque"`` (the state replaced).
        start: node of the earlier dominator; ``end``: of the later.
        nodes: nodes between them that depend on the start, the end included.
        status: status of each of ``nodes`` with respect to ``start``.
        carried: arguments that carry; ``written``: arguments that are written; ``constant``: that depend on
            neither.
    """

    kind: Literal["join", "local", "opaque"]
    start: Node
    end: Node
    nodes: list[Node]
    status: dict[int, Status]
    carried: tuple[Leaf, ...] = ()
    written: tuple[Leaf, ...] = ()
    constant: tuple[Leaf, ...] = ()

    def ancestors(self, index: int) -> list[Node]:
        """Return the nodes of this link that the node ``index`` is made from, itself included, in order."""
        wanted = {index}
        for node in reversed(self.nodes):
            if node.index in wanted:
                wanted |= {maker for _, t, maker in node.inputs if carries(t)}
        return [node for node in self.nodes if node.index in wanted]

    def linear_path(self, index: int) -> list[Node]:
        """Return the calls that carry the start to the node ``index``, itself included, in order.

        Calls that only make a coefficient of a carrying call (a mixing matrix, say) are not among them.
        """
        wanted = {index}
        for node in reversed(self.nodes):
            if node.index in wanted and self.status[node.index] is Status.LINEAR:
                wanted |= {maker for _, t, maker in node.inputs if carries(t)}
        return [n for n in self.nodes if n.index in wanted and self.status[n.index] is Status.LINEAR]

    def maps_state(self, leaf: Leaf) -> bool:
        """Whether a write is the state times matrices and nothing else: no norm, no function of it."""
        made = [n for n in self.ancestors(leaf.maker) if self.status[n.index] is not Status.CONSTANT]
        return bool(made) and all(n.name in CONTRACTION or n.name in SHAPE for n in made)

    @property
    def carry_kind(self) -> CarryKind:
        """How the carried part comes from the start."""
        if not self.carried:
            return "none"
        paths = [n for leaf in self.carried for n in self.linear_path(leaf.maker)]
        plain = len(self.carried) == 1 and self.carried[0].sign > 0
        return path_kind(paths, self.nodes) if plain else "mix"


def path_kind(path: list[Node], nodes: list[Node]) -> CarryKind:
    """Say in a word what a chain of carrying calls does, ``nodes`` being all calls around it."""
    working = [n for n in path if n.name not in SHAPE]
    if not working:
        return "identity"
    around = {n.index: n for n in nodes}
    if any(n.name in NORMS or _divides_by_size(n, around) for n in working):
        return "norm"
    return "scale" if all(_is_scaling(n) for n in working) else "mix"


def _divides_by_size(node: Node, around: dict[int, Node]) -> bool:
    """Whether ``node`` multiplies or divides by a root or a deviation, as a norm written by hand does."""
    if node.name not in ("mul", "div"):
        return False
    factors = [maker for _, _, maker in node.inputs]
    while factors:
        factor = around.get(factors.pop())
        if factor is None:
            continue
        if factor.name in SIZES:
            return True
        if factor.name in SHAPE or factor.name in ("add", "clamp", "clamp_min", "maximum", "reciprocal"):
            factors += [maker for _, _, maker in factor.inputs[:1]]
    return False


def _is_scaling(node: Node) -> bool:
    return node.name in ("mul", "div") and sum(t.numel() != 1 for _, t, _ in node.inputs) <= 1


def relevant_nodes(trace: Trace, source: int, sink: int) -> list[Node]:
    """Return the nodes on float paths from node ``source`` to node ``sink``, both included, in order."""
    forward = {source}
    for node in trace.nodes[source + 1 : sink + 1]:
        if any(maker in forward and carries(t) for _, t, maker in node.inputs) and any(
            carries(t) for t in node.outputs
        ):
            forward.add(node.index)
    backward = {sink}
    for node in reversed(trace.nodes[source : sink + 1]):
        if node.index in backward:
            backward |= {maker for _, t, maker in node.inputs if carries(t)}
    return [trace.nodes[i] for i in sorted(forward & backward)]


def dominators(nodes: list[Node]) -> list[Node]:
    """Return the nodes that every path from the first to the last of ``nodes`` passes.

    The nodes are in execution order, so a node is one exactly when no edge jumps over it.
    """
    if not nodes:
        return []
    known = {n.index for n in nodes}
    furthest = {n.index: n.index for n in nodes}
    for node in nodes:
        for _, t, maker in node.inputs:
            if maker in known and carries(t):
                furthest[maker] = max(furthest[maker], node.index)
    found: list[Node] = []
    reach = nodes[0].index
    for node in nodes:
        if reach <= node.index:
            found.append(node)
        reach = max(reach, furthest[node.index])
    return found


def links(nodes: list[Node], states: list[Node]) -> list[Link]:
    """Classify what lies between each two consecutive ``states``, the dominators of ``nodes``."""
    found: list[Link] = []
    position = 0
    for start, end in itertools.pairwise(states):
        between: list[Node] = []
        while position < len(nodes) and nodes[position].index <= end.index:
            if nodes[position].index > start.index:
                between.append(nodes[position])
            position += 1
        found.append(_classify(start, end, between))
    return found


def _classify(start: Node, end: Node, between: list[Node]) -> Link:
    status: dict[int, Status] = {start.index: Status.LINEAR}

    def status_of(t: Tensor, maker: int) -> Status:
        if not carries(t):
            return Status.CONSTANT
        return status.get(maker, Status.CONSTANT)

    width = start.output.shape[-1] if start.output.ndim else 0
    for node in between:
        status[node.index] = status_of_call(node, status_of, width)
    bare = Link("opaque", start, end, between, status)
    if end.name in JOINS:
        leaves = _leaves(end, {n.index: n for n in between}, 1.0)
        sides: dict[Status, list[Leaf]] = {s: [] for s in Status}
        for leaf in leaves:
            written = leaf.slot == REMAINDER
            sides[Status.OTHER if written else status_of(leaf.tensor, leaf.maker)].append(leaf)
        carried, written, constant = (tuple(sides[s]) for s in (Status.LINEAR, Status.OTHER, Status.CONSTANT))
        if carried and written and not sides[Status.JOINED]:
            return dataclasses.replace(bare, kind="join", carried=carried, written=written, constant=constant)
        if carried and constant and not sides[Status.JOINED]:
            return dataclasses.replace(bare, kind="local", carried=carried, constant=constant)
    if status[end.index] is Status.LINEAR:
        return dataclasses.replace(bare, kind="local")
    return bare


def _leaves(node: Node, between: dict[int, Node], sign: float) -> list[Leaf]:
    """Flatten the additions that end in ``node``, as far as they were made in the same module call."""
    if node.name in FUSED_ADDS:
        return [Leaf(node, 0, _maker(node, 0), sign), Leaf(node, REMAINDER, node.index, sign)]
    found: list[Leaf] = []
    for slot, t, maker in node.inputs:
        if not carries(t):
            continue
        negative = (node.name == "sub" and slot != 0) or (node.name == "rsub" and slot == 0)
        leaf = Leaf(node, slot, maker, -sign if negative else sign)
        inner = between.get(maker)
        if inner is not None and inner.name in ("add", "sub") and inner.key.frame == node.key.frame:
            found += _leaves(inner, between, leaf.sign)
        else:
            found.append(leaf)
    return found


def _maker(node: Node, slot: int) -> int:
    return next(maker for s, _, maker in node.inputs if s == slot)
