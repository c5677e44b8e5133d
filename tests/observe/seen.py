"""One bare and one recorded pass of each case, made once and shared by all tests that only look."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo import CASES, REAL, Case

from mainstem.observe import Recording, StreamMap, find_stream, record
from mainstem.observe.keep import KeepStream


@dataclasses.dataclass(frozen=True)
class Seen:
    """What two passes of a case showed.

    Attributes:
        bare: tensors the model returned without recording; ``module_outputs``: of each call of each module.
        kept: all points of the recorded pass.
    """

    case: Case
    model: nn.Module
    inputs: dict[str, Any]
    map: StreamMap
    bare: list[Tensor]
    module_outputs: Mapping[str, list[Tensor]]
    recording: Recording
    kept: KeepStream

    def block_outputs(self, block: int) -> dict[str, Tensor]:
        """Return what the modules of one block put out in the bare pass."""
        where = self.map.blocks[block]
        prefix = where.module + "."
        inside = {
            name[len(prefix) :]: calls
            for name, calls in self.module_outputs.items()
            if name.startswith(prefix)
        }
        return {name: calls[where.call] for name, calls in inside.items() if len(calls) > where.call}


def tensors(output: Any) -> list[Tensor]:
    """Return all tensors of a model's output, in order."""
    if isinstance(output, Mapping):
        output = dict(output)
    return [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]


@functools.cache
def see(name: str) -> Seen:
    """Run the case called ``name``, bare and recorded."""
    case = (CASES | REAL)[name]
    model, inputs = case.build(), case.inputs()
    outputs: defaultdict[str, list[Tensor]] = defaultdict(list)

    def keep(path: str, output: Any) -> None:
        first = next((t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)), None)
        if first is not None:
            outputs[path].append(first.clone())

    hooks = [
        m.register_forward_hook(lambda _m, _a, output, path=path: keep(path, output))
        for path, m in model.named_modules()
    ]
    with torch.no_grad():
        bare = [t.clone() for t in tensors(model(**inputs))]
    for hook in hooks:
        hook.remove()
    stream_map = find_stream(model, inputs, source=case.source)
    kept = KeepStream()
    with torch.no_grad():
        recording = record(model, inputs, stream_map, [kept], keep_tail=True)
    return Seen(case, model, inputs, stream_map, bare, outputs, recording, kept)
