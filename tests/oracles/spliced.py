"""A model of transformers whose residual is ours: its own attention and feed-forward inside our connections.

The copy keeps every branch, embedding and head; each decoder layer loses its norms and whatever else its
residual owned, and gets two connections with the same weights in their place. What the two models compute,
and every gradient, can then be compared from end to end, by the original's names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from agreement import Run, run
from families import AllInFloat64
from torch import Tensor, nn

from mainstem.connections import Connection, NormConfig, Scheme, Stream, Trunk

Branch = Callable[[Any, Tensor, dict[str, Any]], Any]


class Family(NamedTuple):
    """How a model's decoder layers are put together.

    Attributes:
        build: makes the model.
        scheme: ours.
        norm: that of the connections; ``eps`` is the config's.
        joins: for each of the two sublayers, parameter of the layer -> parameter of the connection.
        branches: how the layer calls each sublayer's branch, ``(layer, read, keyword arguments)``; a tuple's
            first entry is the update.
        enter, leave: between what the model hands from layer to layer and our stream.
        ends: parameter of the model below ``body`` -> parameter of the trunk.
        end: puts the trunk's way out into the model.
        load: what a parameter of theirs is as one of ours.
        returns: what a layer returns, from the new stream and the attention's output.
        tune: changes connection ``i`` after it is built; a weight that the model lacks is set and frozen.
    """

    build: Callable[[], Any]
    scheme: Scheme
    joins: tuple[Mapping[str, str], Mapping[str, str]]
    branches: tuple[Branch, Branch]
    norm: Callable[[float], NormConfig] = lambda eps: NormConfig(eps=eps)
    enter: Callable[..., Stream] = lambda hidden, index: hidden
    leave: Callable[..., Tensor] = lambda stream, index: stream
    ends: Mapping[str, str] = {}
    end: Callable[[Any, Trunk], None] | None = None
    load: Callable[[str, Tensor], Tensor] = lambda name, weight: weight
    returns: Callable[[Tensor, Any], Any] = lambda hidden, attended: hidden
    tune: Callable[[Connection, int], None] | None = None


def attention(layer: Any, read: Tensor, given: dict[str, Any]) -> Any:
    return layer.self_attn(hidden_states=read, **given)


def feed_forward(layer: Any, read: Tensor, given: dict[str, Any]) -> Any:
    return layer.mlp(read)


def splice_layer(layer: Any, joins: Sequence[Connection], family: Family, index: int) -> None:
    """Give ``layer`` a forward of ours and take away the modules that it no longer needs."""
    for name in {key.split(".")[0] for names in family.joins for key in names}:
        delattr(layer, name)
    layer.joins = nn.ModuleList(joins)

    def forward(hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        outputs: list[Any] = []

        def branch(which: int, read: Tensor) -> Tensor:
            outputs.append(family.branches[which](layer, read, given))
            return outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]

        stream = family.enter(hidden_states, *args, index=index)
        for which, join in enumerate(joins):
            stream = join(stream, lambda read, which=which: branch(which, read))
        return family.returns(family.leave(stream, index=index), outputs[0])

    layer.forward = forward


def compare(family: Family, inputs: Callable[[], dict[str, Any]]) -> tuple[Run, Run]:
    """Run both in fp64 and return what ours and theirs computed: logits, and the gradient of every weight."""
    theirs = family.build().double()
    for part in (theirs.config, theirs.config.get_text_config()):
        part._attn_implementation = part._experts_implementation = "eager"
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif not parameter.any():
                parameter.normal_(std=0.3)
    ours, names = spliced(theirs, family)
    given = inputs()
    with AllInFloat64():
        results = []
        for model in (ours, theirs):
            logits = model(**given, use_cache=False).logits
            assert logits.dtype == torch.float64
            results.append(run(logits, {n: p for n, p in model.named_parameters() if p.requires_grad}))
    ours_run = Run(results[0].values, {names.get(n, n): g for n, g in results[0].gradients.items()})
    return ours_run, results[1]


def spliced(theirs: Any, family: Family) -> tuple[Any, dict[str, str]]:
    """Return the copy, and our names of its parameters -> the original's."""
    ours = copy.deepcopy(theirs)
    prefix, body = next(
        (n, m) for n, m in ours.named_modules() if isinstance(getattr(m, "layers", None), nn.ModuleList)
    )
    config = body.config
    layers = list(body.layers)
    # Constants of depth are buffers in the default dtype.
    torch.set_default_dtype(torch.float64)
    try:
        norm, num_sublayers = family.norm(config.rms_norm_eps), 2 * len(layers)
        trunk = family.scheme.build(width=config.hidden_size, num_sublayers=num_sublayers, norm=norm)
    finally:
        torch.set_default_dtype(torch.float32)
    state = dict(body.named_parameters())
    names: dict[str, str] = {}

    def take(their_name: str, our_name: str, target: Tensor) -> None:
        with torch.no_grad():
            weight = family.load(their_name, state[their_name])
            assert weight.shape == target.shape
            target.copy_(weight)
        names[f"{prefix}.{our_name}"] = f"{prefix}.{their_name}"

    joins = trunk.release_connections()
    for i, layer in enumerate(layers):
        pair = joins[2 * i : 2 * i + 2]
        for which, join in enumerate(pair):
            parameters = dict(join.named_parameters())
            for theirs_is, ours_is in family.joins[which].items():
                if f"layers.{i}.{theirs_is}" in state:
                    take(
                        f"layers.{i}.{theirs_is}",
                        f"layers.{i}.joins.{which}.{ours_is}",
                        parameters.pop(ours_is),
                    )
            if family.tune is not None:
                family.tune(join, 2 * i + which)
            left = [name for name, parameter in parameters.items() if parameter.requires_grad]
            assert not left, f"weights of ours that the model has none for: {left}"
        splice_layer(layer, pair, family, i)
    if family.end is not None:
        for theirs_is, ours_is in family.ends.items():
            take(theirs_is, f"trunk.{ours_is}", trunk.get_parameter(ours_is))
        family.end(body, trunk)
        body.trunk = trunk
    return ours, names
