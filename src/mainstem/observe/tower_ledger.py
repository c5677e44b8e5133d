"""The ledger of a tower, from what its connections say of themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mainstem.connections import Connection, Stream, Trunk
from mainstem.observe.ledger import Ledger


class Tower(Protocol):
    """What this module asks of a transformer; :class:`mainstem.tower.Tower` is one."""

    trunk: Trunk
    blocks: nn.ModuleList

    def sublayers(self) -> Iterator[tuple[int, Connection, dict[str, nn.Module]]]:
        """Yield block number, connection, and branches by kind, in order."""
        ...


@torch.no_grad()
def tower_ledger(tower: Tower, token_ids: Tensor, attention_mask: Tensor | None = None) -> Ledger:
    """Return the ledger of a tower by the linearization of each of its connections.

    Where :func:`mainstem.observe.ledger` reads coefficients off the data flow, this asks
    :meth:`mainstem.connections.Connection.linearize`; the two are independent and agree, except that here the
    bias of a norm on a write is in the ``bias`` row and there in the write's own. It works for every stream a
    connection can carry, histories too. Holds one stream for each write; give it few tokens.

    Args:
        tower: run once, without gradients.
        token_ids: ``[batch, pos]`` int64.
        attention_mask: ``[batch, pos]``, true for real tokens.

    Returns:
        Rows after ``collapse``, ``[component, batch, pos, width]``; their sum is what the final norm reads.
    """
    embedded, positions, updates = _run(tower, token_ids, attention_mask)
    stream: Stream = embedded
    labels = ["embed", *(["pos_embed"] if positions is not None else [])]
    labels += [f"{block}_{kind}_out" for block, _, branches in tower.sublayers() for kind in branches]
    labels.append("bias")
    index = {label: i for i, label in enumerate(labels)}
    first = embedded

    def zeros(t: Tensor) -> Tensor:
        return t.new_zeros(len(labels), *t.shape)

    rows = _map(zeros, embedded)
    if positions is not None:
        added = _map(torch.Tensor.expand_as, tower.trunk.expand(positions), embedded)
        first = _map(torch.sub, embedded, added)
        rows = _add(rows, index["pos_embed"], added)
    rows = _add(rows, index["embed"], first)
    start = tower.trunk.linearize_collapse(embedded)(first)
    for (block, connection, branches), parts in zip(tower.sublayers(), updates, strict=True):
        update = torch.stack(list(parts.values())).sum(0) if len(parts) > 1 else next(iter(parts.values()))
        update = connection.stream_of(update)
        _, context = connection.read(stream)
        step = connection.linearize(stream, update, context)
        rows = torch.vmap(step.carry)(rows)  # all at once; what is not written yet stays zero
        for kind in branches:
            rows = _add(rows, index[f"{block}_{kind}_out"], step.inject(connection.stream_of(parts[kind])))
        if step.offset is not None:
            rows = _add(rows, index["bias"], step.offset)
        stream = connection.write(stream, update, context)
    collapse = tower.trunk.linearize_collapse(stream)
    top = {label: collapse(_map(operator.itemgetter(i), rows)) for label, i in index.items()}
    if (offset := tower.trunk.collapse_offset()) is not None:
        top["bias"] = top["bias"] + offset
    for label in ("pos_embed", "bias"):
        if label in top and not bool(top[label].any()):
            del top[label]
    mask = torch.ones_like(token_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    return Ledger(tuple(top), torch.stack(list(top.values())), tower.trunk.collapse(stream), start, mask)


def _add(rows: Stream, index: int, row: Stream) -> Stream:
    """Return the rows with one more in its place; a history's tensors are mostly untouched by a write."""

    def add(all_rows: Tensor, one: Tensor) -> Tensor:
        if not bool(one.any()):
            return all_rows
        changed = all_rows.clone()  # a carry may have handed out one tensor twice
        changed[index] += one
        return changed

    return _map(add, rows, row)


def _run(
    tower: Tower, token_ids: Tensor, attention_mask: Tensor | None
) -> tuple[Stream, Tensor | None, list[dict[str, Tensor]]]:
    """Return the first stream, what the positions added to it, and every branch's output, from one pass."""
    found: dict[str, Any] = {}
    updates: list[dict[str, Tensor]] = []

    def keep_stream(module: nn.Module, args: tuple[Any, ...]) -> None:
        found["stream"] = args[0]

    handles = [tower.blocks[0].register_forward_pre_hook(keep_stream)]
    table = getattr(tower, "position_embedding", None)
    if isinstance(table, nn.Module):
        handles.append(table.register_forward_hook(_keeper(found, "positions")))
    for _, _, branches in tower.sublayers():
        updates.append({})
        for kind, branch in branches.items():
            handles.append(branch.register_forward_hook(_keeper(updates[-1], kind)))
    try:
        cast(Callable[..., Tensor], tower)(token_ids, attention_mask)
    finally:
        for handle in handles:
            handle.remove()
    return found["stream"], found.get("positions"), updates


def _keeper(place: dict[str, Any], name: str) -> Callable[..., None]:
    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        place[name] = output

    return keep


def _map(function: Callable[..., Tensor], *streams: Stream) -> Stream:
    """Apply a function to the tensors of one or more streams."""
    return cast(Stream, pytree.tree_map(function, *streams))
