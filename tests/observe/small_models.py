"""What a case of the zoo is, and how a small random model is made from a configuration."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()

VOCAB, WIDTH, POSITIONS, BATCH = 100, 64, 11, 2
Rebuild = Callable[[Mapping[str, Tensor]], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture.

    Attributes:
        build: makes the model; ``inputs`` its keyword arguments.
        sublayers: kinds of the writes of each sublayer of a block; ``"attn+mlp"`` for a parallel block.
        blocks: how many blocks; ``odd_blocks`` names those that differ, with their sublayers.
        carry: what the stream goes through before the sum; ``then``: after it.
        streams: how many streams the state has; ``width``: of one.
        writes: by kind, how to rebuild the write from the outputs of the block's modules. Empty where a model
            computes it in no module.
        hidden_states: under which name the model gives the raw states of this stream; None where it does not.
        first_state: number of the state that it gives first.
        source: which input's stream is wanted.
        note: for the table.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    sublayers: tuple[str, ...] = ("attn", "mlp")
    blocks: int = 4
    odd_blocks: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    carry: str = "identity"
    then: str = "identity"
    streams: int = 1
    width: int = WIDTH
    writes: Mapping[str, Rebuild] = dataclasses.field(default_factory=dict)
    hidden_states: str | None = "hidden_states"
    first_state: int = 0
    source: str | None = None
    note: str = ""

    @property
    def num_sites(self) -> int:
        return sum(len(self.odd_blocks.get(i, self.sublayers)) for i in range(self.blocks))


def out(module: str, scale: float = 1.0) -> Rebuild:
    """The write is the output of a module of the block, times a number."""
    return lambda outputs: outputs[module] * scale


def gated(module: str, gate: str) -> Rebuild:
    """The write is a module's output, weighed for each stream by the first output of a hyper-connection."""
    return lambda outputs: outputs[gate].unsqueeze(-1) * outputs[module].unsqueeze(-2)


def tokens() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, POSITIONS), generator=generator)}


def shake(model: nn.Module) -> nn.Module:
    """Make norm weights and biases non-trivial, so that a forgotten one shows."""
    for parameter in model.parameters():
        if parameter.ndim <= 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def from_config(config: Callable[[], Any], auto: str = "AutoModelForCausalLM") -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return shake(getattr(transformers, auto).from_config(config()))

    return build


def from_class(name: str, config: Callable[[], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return shake(getattr(transformers, name)(config()))

    return build


def base(**changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return sizes | changes


def language_model(config_class: str, writes: Mapping[str, Rebuild], /, **changes: Any) -> Case:
    case = {f.name: changes.pop(f.name) for f in dataclasses.fields(Case) if f.name in changes}
    config = functools.partial(getattr(transformers, config_class), **changes)
    return Case(build=from_config(config), inputs=tokens, writes=writes, **case)
