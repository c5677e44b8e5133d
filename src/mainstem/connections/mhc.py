"""Manifold-constrained Hyper-Connections: streams mixed by a matrix that cannot make them grow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from mainstem.connections._base import Connection, Properties
from mainstem.connections._mixing import Generator, MixGenerator, make_generator
from mainstem.connections._norms import NormConfig
from mainstem.connections._sinkhorn import Guard, Order, Sinkhorn, Start
from mainstem.connections._streams import HeadStart, SigmoidCoefficients, StreamHead, logit, start_at_
from mainstem.connections.identity_hc import GatedStreamsScheme, GateStart, IdentityHCConnection
from mainstem.errors import ConfigError

Orientation = Literal["out_in", "in_out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixStart:
    """Initial logits of the mix, the standard deviation of its projection, and the orientation."""

    logits: tuple[float, ...]
    projection_std: float
    orientation: Orientation


class MhcConnection(IdentityHCConnection):
    """``X' = H_res X + H_post^T F(N(H_pre X))`` with ``H_res`` on a manifold.

    ::

        X ─┬─ RMS(vec X) ─► z ─► H_pre = s(z_pre) + read_epsilon, H_post = multiplier s(z_post)
           │                └──► H_res = generator(z_res): doubly stochastic, or a rotation
           ├─ H_pre X ─► N ─► F ─► H_post^T F ─(+)─► X'
           └─ H_res X ────────────────────────┘

    ``z = scale * (RMS(vec X) projection^T) + bias``, per token. ``orientation="out_in"`` is the paper's
    product ``X'_o = sum_i H[o, i] X_i``; ``"in_out"`` takes the generator's matrix transposed.

    Shapes: stream ``[batch, pos, n, width]``; read and update ``[batch, pos, width]``; a mix ``[n, n]`` per
    token. Parameters: ``(2n + m)(n width + 1) + 3`` and the branch's norm, with m logits of the mix: ``n^2``
    (Sinkhorn), ``n!`` (permutation), ``2 log2 n`` (Kronecker), ``n (n - 1) / 2`` (Cayley). FLOPs a token:
    ``2 n width (2n + m)`` for the coefficients, ``2 n width (n + 2)`` for applying them, ``4 n^2`` for each
    Sinkhorn step. Moved by a fused write: ``2n + 1`` widths.
    At initialisation: scales 0.01 (the paper's), biases 0 and the projection N(0, 0.02^2), which the paper
    leaves open (biases as in Megatron and transformers, deviation as in transformers), so that ``H_post`` is
    about 1 and the plain residual is near; permutation and Kronecker mixes start at their papers' logits.
    ``exact_start``: ``H_post = 1``, reads that sum to 1 and differ by sublayer, any ``H_res`` whose rows sum
    to 1. The gradient of reads is then as small as the norm's epsilon, and that of a doubly stochastic
    ``H_res`` is zero, until the first step has told the streams apart.
    Invariant: a product of doubly stochastic matrices is one, so its rows and columns sum to 1 and its
    spectral norm is at most 1 at any depth; a product of rotations is a rotation.
    Source: Xie et al. 2025 (arXiv 2512.24880), eqs. 3 and 6 to 9, sections 3 and 4 read;
    ``DeepseekV4HyperConnection`` of transformers 5.24, read in code; generators: see
    :mod:`mainstem.connections._mixing`.
    Departures: the norm's gain is part of the projection, as the paper's kernels have it.
    """

    def __init__(
        self,
        *,
        norm: nn.Module,
        gates: SigmoidCoefficients,
        start: GateStart,
        generator: MixGenerator,
        mix_start: MixStart,
    ):
        self.mix_start = mix_start
        super().__init__(norm=norm, gates=gates, start=start)
        self.generator = generator
        self.promises = generator.promises  # each holds of the transposed matrix too
        self.transposed = mix_start.orientation == "in_out"

    def reset_parameters(self) -> None:
        """Draw the mix's part of the projection apart where it differs."""
        super().reset_parameters()
        std = self.start.projection_std
        if std != self.mix_start.projection_std:
            gates, mix = self.gates.projection.split([2 * self.gates.sizes[0], self.gates.sizes[2]])
            gates = torch.empty_like(gates).normal_(std=std)
            mix = torch.empty_like(mix).normal_(std=self.mix_start.projection_std)
            start_at_(self.gates.projection, torch.cat([gates, mix]))

    def start_bias(self) -> list[float]:
        """Reads, writes, then the mix."""
        return [*super().start_bias(), *self.mix_start.logits]

    def coefficients(self, stream: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ``H_pre``, ``H_post`` and ``H_res`` as ``[out, in]``."""
        read, write, mix = self.gates(stream)
        matrix = self.generator(mix)
        return (
            read.sigmoid() + self.read_epsilon,
            self.multiplier * write.sigmoid() + self.write_epsilon,
            matrix.mT if self.transposed else matrix,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mhc(GatedStreamsScheme):
    """Manifold-constrained Hyper-Connections (``"mhc"``).

    Attributes:
        mixing: generator of the residual matrix: ``"sinkhorn"``, ``"permutation"`` (mHC-lite),
            ``"kronecker"`` (KromHC) or ``"cayley"`` (orthogonal).
        orientation: ``"out_in"`` as in the paper, Liger and Megatron; ``"in_out"`` as in TileKernels and
            transformers.
        sinkhorn_steps, sinkhorn_order, sinkhorn_start, sinkhorn_epsilon, sinkhorn_guard: see
            :class:`~mainstem.connections._sinkhorn.Sinkhorn`.
    """

    name: ClassVar[str] = "mhc"
    year: ClassVar[int] = 2025
    paper: ClassVar[str] = "2512.24880"
    formula: ClassVar[str] = "X' = H_res X + H_post^T F(N(H_pre X)), H_res doubly stochastic"
    properties: ClassVar[Properties] = Properties(
        equals_pre_norm_at_start=False, start_distance=0.0012, num_streams=4, traffic=9.0
    )

    mixing: Generator = "sinkhorn"
    orientation: Orientation = "out_in"
    sinkhorn_steps: int = 20
    sinkhorn_order: Order = "columns_first"
    sinkhorn_start: Start = "exp"
    sinkhorn_epsilon: float = 0.0
    sinkhorn_guard: Guard = "add"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.orientation not in ("out_in", "in_out"):
            raise ConfigError(f"orientation {self.orientation!r} is not known; choose 'out_in' or 'in_out'.")
        make_generator(self.mixing, self.num_streams, self.sinkhorn())
        if not (self.exact_start and self.mixing == "sinkhorn"):
            return
        if self.sinkhorn_epsilon > 0 and (self.sinkhorn_guard == "add" or self.sinkhorn_start == "softmax"):
            raise ConfigError(
                f"{self.name} with exact_start=True needs sinkhorn_epsilon=0, not {self.sinkhorn_epsilon}: "
                "it takes that much off the sums at every sublayer."
            )
        if (self.orientation == "out_in") != (self.sinkhorn_order == "columns_first"):
            last = "columns_first" if self.orientation == "out_in" else "rows_first"
            raise ConfigError(
                f"{self.name} with exact_start=True needs the sums over what is read to be divided by last; "
                f"with orientation={self.orientation!r} set sinkhorn_order={last!r}."
            )

    def sinkhorn(self) -> Sinkhorn:
        """Return the Sinkhorn options as one."""
        return Sinkhorn(
            steps=self.sinkhorn_steps,
            order=self.sinkhorn_order,
            start=self.sinkhorn_start,
            epsilon=self.sinkhorn_epsilon,
            guard=self.sinkhorn_guard,
        )

    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build one."""
        generator = make_generator(self.mixing, self.num_streams, self.sinkhorn())
        gates = SigmoidCoefficients(
            width=width, num_streams=self.num_streams, num_logits=generator.num_logits, eps=norm.eps
        )
        with torch.device("cpu"):  # numbers, also where the model itself is built without any
            logits = generator.exact_start() if self.exact_start else generator.published_start()
        # Rows that sum to 1 for any logits may depend on the token without moving streams that are equal.
        still = self.exact_start and "rows" not in generator.promises
        mix_start = MixStart(
            logits=tuple(logits.tolist()), projection_std=0.0 if still else 0.02, orientation=self.orientation
        )
        return MhcConnection(
            norm=norm.build(width),
            gates=gates,
            start=self.gate_start(index),
            generator=generator,
            mix_start=mix_start,
        )

    def build_head(self, *, width: int, norm: NormConfig) -> nn.Module:
        """Build DeepSeek-V4's learned sum, all streams alike at the start."""
        n = self.num_streams
        start = HeadStart(bias=logit(1 / n - self.read_epsilon) if n > 1 else 40.0)
        return StreamHead(width=width, num_streams=n, eps=norm.eps, epsilon=self.read_epsilon, start=start)


CONVENTIONS: Mapping[str, Mapping[str, Any]] = {
    "paper": {},
    "deepseek_v4": {
        "orientation": "in_out",
        "sinkhorn_order": "rows_first",
        "sinkhorn_start": "softmax",
        "sinkhorn_epsilon": 1e-6,
        "read_epsilon": 1e-6,
        "collapse": "head",
    },
    "megatron": {
        "orientation": "out_in",
        "sinkhorn_order": "rows_first",
        "sinkhorn_epsilon": 1e-6,
        "sinkhorn_guard": "clamp",
    },
}
"""Options of :class:`Mhc` that make it compute what a published implementation does.

``"deepseek_v4"``: transformers and, but for a multiplier of 1 by default, TileKernels. ``"megatron"``: as
described in public issues (NVIDIA/Megatron-LM #4957, #5106); its code was not run here.
"""


def transpose_orientation(
    state: Mapping[str, Tensor], options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Turn one orientation of a Sinkhorn mix into the other: other weights and options, the same function.

    The logits' matrix is transposed in ``bias`` and ``projection``, and rows and columns change places in
    the order of Sinkhorn's divisions.

    Args:
        state: a state dict with any number of ``gates.bias`` and ``gates.projection`` in it.
        options: the options of the :class:`Mhc` it belongs to.

    Returns:
        The state and the options of the other orientation.

    Raises:
        ConfigError: the mix is not made by Sinkhorn.
    """
    scheme = Mhc(**options)
    if scheme.mixing != "sinkhorn":
        raise ConfigError(f"only a Sinkhorn mix has an orientation to transpose, not {scheme.mixing!r}.")
    n = scheme.num_streams
    order = torch.arange(n * n).reshape(n, n).T.flatten() + 2 * n
    order = torch.cat([torch.arange(2 * n), order])
    turned = {
        name: value[order] if name.endswith(("gates.bias", "gates.projection")) else value
        for name, value in state.items()
    }
    flipped = {
        "orientation": "in_out" if scheme.orientation == "out_in" else "out_in",
        "sinkhorn_order": "rows_first" if scheme.sinkhorn_order == "columns_first" else "columns_first",
    }
    return turned, {**options, **flipped}


DEEPSEEK_V4_NAMES: Mapping[str, str] = {
    "fn": "gates.projection",
    "base": "gates.bias",
    "scale": "gates.scale",
    "hc_fn": "head.projection",
    "hc_base": "head.bias",
    "hc_scale": "head.scale",
}


def from_deepseek_v4(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a ``DeepseekV4HyperConnection``'s or ``HyperHead``'s parameters (HY-V4's too) to ours.

    Rows are in the same order: read, write, mix. For ``Mhc(**CONVENTIONS["deepseek_v4"])``; the branch's norm
    is the block's own in transformers and is not part of it.
    """
    return {DEEPSEEK_V4_NAMES[name]: value for name, value in state.items()}


def to_deepseek_v4(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename back what :func:`from_deepseek_v4` has renamed; a norm's weight is left out."""
    names = {ours: theirs for theirs, ours in DEEPSEEK_V4_NAMES.items()}
    return {names[name]: value for name, value in state.items() if name in names}
