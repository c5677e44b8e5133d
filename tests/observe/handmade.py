"""Stacks written by hand, in the ways people write them; PyTorch's own encoder among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

VOCAB, WIDTH, HIDDEN = 100, 64, 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandCase:
    """A model by hand; the attributes are those of ``zoo.Case``.

    Attributes:
        parts: modules of the block whose outputs are the writes of attention and feed-forward.
        sign: how they are added.
    """

    model: Callable[[], nn.Module]
    sublayers: tuple[str, ...] = ("attn", "mlp")
    blocks: int = 4
    odd_blocks: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    carry: str = "identity"
    then: str = "identity"
    parts: tuple[str, str] = ("attention", "feed_forward")
    sign: float = 1.0
    note: str = ""


class Attention(nn.Module):
    """Causal attention with one head, spelled out."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.queries(x) @ self.keys(x).transpose(-1, -2) / WIDTH**0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.project(weights @ self.values(x))


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


class Block(nn.Module):
    """The parts of a block; how they are joined is up to the class below."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), feed_forward()


class PreBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(self.first(x))
        x += self.feed_forward(self.second(x))
        return x


class PostBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.attention(x))
        return self.second(x + self.feed_forward(x))


class StairBlock(Block):
    """No residual anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.first(x))
        return self.feed_forward(self.second(x))


class ScaledBlock(Block):
    """A learned gate on what is carried, the write subtracted: ``x * gate - write``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gate - self.attention(self.first(x))
        return x * self.gate - self.feed_forward(self.second(x))


class ThreeTermBlock(Block):
    """Attention and feed-forward in parallel, the stream added last."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.first(x)) + self.feed_forward(self.second(x)) + x


class HandNormBlock(Block):
    """Post-LN whose norm is a formula, not a module."""

    @staticmethod
    def normalise(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.normalise(x + self.attention(x))
        return self.normalise(x + self.feed_forward(x))


class Stack(nn.Module):
    """Token and position embeddings, blocks, final norm, head."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(32, WIDTH))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.position[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TorchEncoder(nn.Module):
    """PyTorch's own encoder."""

    def __init__(self, *, norm_first: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, batch_first=True, norm_first=norm_first)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(input_ids)))


class DenseStack(Stack):
    """Every block reads the sum of all earlier outputs, weighed anew: no state lies between two blocks."""

    def __init__(self, *blocks: nn.Module):
        super().__init__(*blocks)
        self.weights = nn.Parameter(torch.rand(len(blocks) + 1, len(blocks) + 1))

    def forward(self, input_ids: Tensor) -> Tensor:
        history = [self.embed(input_ids)]
        for i, block in enumerate(self.blocks):
            history.append(block(sum(w * h for w, h in zip(self.weights[i], history, strict=False))))
        return self.head(self.norm(sum(w * h for w, h in zip(self.weights[-1], history, strict=False))))


class OuterResidual(Stack):
    """The embedding is added once more after the last block."""

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + embedded))


def stack(kind: type[nn.Module], blocks: int = 4) -> Callable[[], nn.Module]:
    return lambda: Stack(*(kind() for _ in range(blocks)))


def mixed() -> nn.Module:
    """Residuals on some layers and none on others."""
    return Stack(PreBlock(), StairBlock(), PreBlock(), StairBlock(), PreBlock())


_TORCH = ("dropout1", "dropout2")

HANDMADE: dict[str, HandCase] = {
    "hand_pre_norm": HandCase(model=stack(PreBlock)),
    "hand_in_place": HandCase(model=stack(InPlaceBlock), note="x += write"),
    "hand_post_norm": HandCase(model=stack(PostBlock), then="norm", note="Post-LN"),
    "hand_post_norm_formula": HandCase(
        model=stack(HandNormBlock), then="norm", note="Post-LN, norm not a module"
    ),
    "hand_no_residual": HandCase(model=stack(StairBlock), carry="none", note="no residual at all"),
    "hand_some_residuals": HandCase(
        model=mixed, blocks=5, carry="identity/none", note="residual in every other block"
    ),
    "hand_scaled": HandCase(model=stack(ScaledBlock), carry="mix", sign=-1.0, note="gated, write subtracted"),
    "hand_three_terms": HandCase(
        model=stack(ThreeTermBlock), sublayers=("attn+mlp",), note="parallel, stream last"
    ),
    "torch_encoder": HandCase(
        model=lambda: TorchEncoder(norm_first=False),
        then="norm",
        parts=_TORCH,
        note="nn.TransformerEncoder, Post-LN",
    ),
    "torch_encoder_pre_norm": HandCase(
        model=lambda: TorchEncoder(norm_first=True), parts=_TORCH, note="nn.TransformerEncoder"
    ),
}
