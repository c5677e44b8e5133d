"""What a sublayer is, from what it does: attention mixes positions by a softmax, a feed-forward does not."""

from __future__ import annotations

from mainstem.observe._frames import Frame
from mainstem.observe._rules import ATTENTION, CONTRACTION, CONVOLUTION, HEAVY, SHAPE, Status
from mainstem.observe._trace import Node, carries

_MIXER_WORDS = ("mamba", "mixer", "ssm", "conv", "linear_attn", "recurrent", "time_mix", "delta")


def kind_of(nodes: list[Node], status: dict[int, Status], module: str, positions: int) -> str:
    """Return ``"attn"``, ``"cross_attn"``, ``"mlp"`` or ``"mixer"``.

    Args:
        nodes: the calls that made the write, in order.
        status: their status with respect to the state the sublayer started from.
        module: name of the module they were made in, asked only where the calls do not tell.
        positions: number of positions of the pass.
    """
    weights: set[int] = set()
    convolves = False
    for node in nodes:
        convolves = convolves or (node.name in CONVOLUTION and max(node.inputs[1][1].shape[2:]) > 1)
        if node.name in ATTENTION:
            return "attn" if _depends(node, status, 1) else "cross_attn"
        makers = {maker for _, _, maker in node.inputs}
        if node.name == "softmax" and node.output.ndim >= 3 and 0 <= node.output.shape[-1] - positions <= 1:
            weights.add(node.index)
        elif makers & weights:
            if node.name in SHAPE or node.name in ("mul", "cat"):
                weights.add(node.index)
            elif node.name in CONTRACTION or node.name == "baddbmm":
                return "attn" if _all_depend(node, status) else "cross_attn"
    name = module.lower()
    if convolves or any(word in name for word in _MIXER_WORDS):
        return "mixer"
    return "attn" if "attn" in name or "attention" in name else "mlp"


def module_of(nodes: list[Node], status: dict[int, Status], block: Frame | None) -> str:
    """Return the path of the module that did the work: the block's child that holds the last heavy call."""
    heavy = [n for n in nodes if n.name in HEAVY and status.get(n.index) is Status.OTHER]
    if not (heavy or nodes):
        return block.path if block is not None else ""
    path = (heavy or nodes)[-1].key.frame.path
    if block is None or path == block.path:
        return path
    child = path[len(block.path) + 1 :].split(".")[0]
    return f"{block.path}.{child}"


def _depends(node: Node, status: dict[int, Status], argument: int) -> bool:
    floats = [(t, maker) for _, t, maker in node.inputs if carries(t)]
    return argument >= len(floats) or status.get(floats[argument][1], Status.CONSTANT) is not Status.CONSTANT


def _all_depend(node: Node, status: dict[int, Status]) -> bool:
    return all(status.get(m, Status.CONSTANT) is not Status.CONSTANT for _, t, m in node.inputs if carries(t))
