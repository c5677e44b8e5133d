"""Which torch functions are linear in the stream once their coefficients are frozen.

A tensor of a traced pass is, with respect to a state of the stream, one of three things: it does not depend
on it (CONSTANT); it is an affine function of it through functions that only carry (LINEAR): shape, cast, sum,
scale, norm with frozen statistics, mixing of a few streams; or it went through something that learns (OTHER):
a weight matrix, an attention, a non-linearity. What is carried is LINEAR, what is written is OTHER, and their
sum is JOINED.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from torch import Tensor

from mainstem.observe._trace import Node

MAX_STREAMS = 32
"""A contraction over more entries than this is a weight matrix, not a mixing of streams."""

SHAPE = frozenset(
    [
        "view",
        "reshape",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "repeat",
        "repeat_interleave",
        "contiguous",
        "clone",
        "flatten",
        "unflatten",
        "movedim",
        "swapaxes",
        "swapdims",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "detach",
        "getitem",
        "split",
        "chunk",
        "unbind",
        "select",
        "narrow",
        "index_select",
        "get:T",
        "get:mT",
        "get:data",
        "t",
        "roll",
        "dropout",
        "view_as",
        "reshape_as",
        "split_with_sizes",
        "tensor_split",
        "broadcast_to",
        "pad",
        "alias",
        "cpu",
        "cuda",
        "neg",
        "take_along_dim",
        "gather",
        "get:H",
        "get:mH",
        "_to_copy",
        "masked_fill",
        "cumsum",
        "dropout1d",
        "feature_dropout",
        "alpha_dropout",
    ]
)
LIKE_ANOTHER = frozenset(["view_as", "reshape_as", "expand_as", "type_as"])
"""Of what these are given second, only the shape or the dtype matters."""
ADDITIVE = frozenset(["add", "sub", "rsub", "cat", "concat", "concatenate", "stack", "where", "setitem"])
PRODUCT = frozenset(["mul"])
CONTRACTION = frozenset(["matmul", "bmm", "mm", "einsum", "linear", "tensordot", "rmatmul"])
REDUCTION = frozenset(["sum", "mean"])
NORMS = frozenset(["layer_norm", "rms_norm", "normalize"])
SIZES = frozenset(["rsqrt", "sqrt", "std", "norm", "linalg_norm", "linalg_vector_norm", "vector_norm"])
"""Functions that measure how large a vector is."""
ATTENTION = frozenset(["scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention"])
FUSED_ADDS = frozenset(["addcmul", "addmm", "baddbmm"])
"""Functions that add a product to their first argument: the write itself is never a tensor."""
JOINS = frozenset(["add", "sub", "rsub"]) | FUSED_ADDS
"""Functions that can join a write to the stream."""
CONVOLUTION = frozenset(["conv1d", "conv2d", "conv3d"])
HEAVY = CONTRACTION | ATTENTION | CONVOLUTION | frozenset(["addmm", "baddbmm", "embedding", "_grouped_mm"])
"""Functions in which a sublayer does its work."""


class Status(enum.Enum):
    """What a tensor is with respect to a state of the stream."""

    CONSTANT = 0
    LINEAR = 1
    OTHER = 2
    JOINED = 3


StatusOf = Callable[[Tensor, int], Status]
"""From a tensor and the node that made it to its status."""


def status_of_call(node: Node, status_of: StatusOf, width: int) -> Status:
    """Return what ``node`` makes of inputs with the given statuses, ``width`` being that of the state."""
    given = {slot: status_of(t, maker) for slot, t, maker in node.inputs}
    if node.name in LIKE_ANOTHER:
        return given.get(0, Status.CONSTANT)
    statuses = list(given.values())
    if all(s is Status.CONSTANT for s in statuses):
        return Status.CONSTANT
    linear = [slot for slot, s in given.items() if s in (Status.LINEAR, Status.JOINED)]
    if not linear:
        return Status.OTHER
    if node.name in _FUSED:
        return _FUSED[node.name](given)
    if not _is_linear_call(node, linear, width):
        return Status.OTHER
    joined = Status.JOINED in statuses or (node.name in ADDITIVE and Status.OTHER in statuses)
    return Status.JOINED if joined else Status.LINEAR


def _is_linear_call(node: Node, linear: list[int], width: int) -> bool:
    """Whether ``node`` is linear in the arguments at the slots ``linear`` when all others are frozen."""
    name = node.name
    if name in ADDITIVE:
        return True
    if name in SHAPE or name in REDUCTION or name in NORMS or name == "div":
        return linear == [0]
    if name in PRODUCT:
        return len(linear) == 1
    if name in CONTRACTION:
        return len(linear) == 1 and _is_mixing(node, linear[0], width)
    return False


def _fused_add(given: dict[int, Status]) -> Status:
    """``addcmul``, ``addmm``, ``baddbmm``: the first argument plus a product of the others."""
    rest = [s for slot, s in given.items() if slot != 0]
    if given.get(0) is not Status.LINEAR or Status.LINEAR in rest or Status.JOINED in rest:
        return Status.OTHER
    return Status.JOINED if Status.OTHER in rest else Status.LINEAR


def _gate(given: dict[int, Status]) -> Status:
    """``lerp``, ``gru_cell``: a state beside something that was learned, and no tensor that holds either."""
    return Status.JOINED if len(set(given.values()) - {Status.CONSTANT}) > 1 else Status.OTHER


_FUSED: dict[str, Callable[[dict[int, Status]], Status]] = {
    **dict.fromkeys(FUSED_ADDS, _fused_add),
    **dict.fromkeys(("lerp", "gru_cell", "lstm_cell"), _gate),
}


def _is_mixing(node: Node, slot: int, width: int) -> bool:
    """Whether a contraction of the tensor at ``slot`` runs over a few streams, not over the width."""
    tensor = next(t for s, t, _ in node.inputs if s == slot)
    if node.name == "einsum" and isinstance(node.args[0], str):
        terms, _, result = node.args[0].replace(" ", "").partition("->")
        position = [s for s, _, _ in node.inputs].index(slot)
        term = terms.split(",")[position].replace("...", "")
        sizes = dict(zip(reversed(term), reversed(tensor.shape), strict=False))
        return all(_few(sizes[letter], width) for letter in term if letter not in result)
    if node.name == "linear":
        return False
    if node.inputs[0][0] == slot:
        return _few(tensor.shape[-1], width)
    return tensor.ndim > 1 and tensor.shape[-2] <= MAX_STREAMS


def _few(size: int, width: int) -> bool:
    return size <= MAX_STREAMS and size != width
