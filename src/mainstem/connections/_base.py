"""The interface every residual connection implements.

A connection is an affine step with coefficients::

    stream' = carry(stream) + inject(update) [+ offset]       update = branch(read(stream))

     stream ──┬─────────────── carry ────────────(+)──► stream'
              │                                   ▲
              └── read ──► branch ──► update ── inject

``read`` and ``write`` are what a model runs; ``linearize`` gives the same step with its coefficients frozen,
so that the final state is an exact sum over everything that was ever written: the ledger.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from mainstem.connections._norms import NormConfig, UnitOffsetRMSNorm
from mainstem.connections._policy import StreamModule
from mainstem.connections._recompute import Recompute, run_recomputed
from mainstem.errors import ConfigError

Stream: TypeAlias = Tensor | tuple[Tensor, ...]
"""``[batch, pos, width]``, or ``[batch, pos, n, width]`` for n streams, or a tuple of tensors (history)."""

Context: TypeAlias = Tensor | tuple[Tensor, ...] | None
"""Whatever ``read`` worked out that ``write`` needs again, such as dynamic write weights."""


@dataclasses.dataclass(frozen=True)
class AffineStep:
    """One sublayer's step with its coefficients frozen at the values of one forward pass.

    Invariant: ``carry(stream) + inject(update) + offset == write(stream, update, context)``.

    Attributes:
        carry: linear map Stream -> Stream: what the step keeps of what was known.
        inject: linear map ``[batch, pos, width]`` -> Stream: how what was learned is added.
        offset: Stream added whatever the stream and the update are (a norm's bias), or None.
    """

    carry: Callable[[Stream], Stream]
    inject: Callable[[Tensor], Stream]
    offset: Stream | None = None


Promise: TypeAlias = Literal["rows", "columns", "orthogonal"]
"""What holds of a mixing matrix for any weights: rows, or columns, that sum to 1; or ``M M^T = 1``."""


@dataclasses.dataclass(frozen=True)
class MixingMatrix:
    """How a step carries n parts of the stream into one another: ``X'_o = sum_i values[..., o, i] X_i``.

    Rows that sum to 1 keep equal streams equal; with columns too, and no negative entry, the matrix is doubly
    stochastic and cannot make the streams grow at any depth; nor can an orthogonal one.

    Attributes:
        values: ``[..., out, in]``.
        promises: what the scheme claims of every such matrix, and `mainstem check` holds it to; empty for a
            free matrix.
    """

    values: Tensor
    promises: frozenset[Promise] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Properties:
    """What a scheme promises; the conformance suite proves each of these.

    Attributes:
        equals_pre_norm_at_start: the freshly built stack computes what plain Pre-LN computes.
        start_distance: relative Frobenius distance from plain Pre-LN of the final-normed output of the
            suite's reference stack (``tests/connections/reference_stack.py``: 24 sublayers, width 64,
            RMSNorm, fp64, causal branches with N(0, 1/fan_in) matrices, the same for every scheme, so
            without ``branch_init_scale``), mean over ten seeds. 0.0 where it is equal.
        num_streams: parallel streams; 1 is the plain ``[batch, pos, width]``.
        has_history: the stream is a tuple of tensors, in which earlier states or writes travel along.
        num_norms: norms a sublayer owns.
        traffic: elements moved per token and sublayer, in units of ``width``, by one fused
            :meth:`Connection.write`: each tensor it reads and each it makes counted once. A plain add is 3
            (reads two, makes one).
    """

    equals_pre_norm_at_start: bool
    start_distance: float
    num_streams: int = 1
    has_history: bool = False
    num_norms: int = 1
    traffic: float = 3.0


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are trained alike.

    Attributes:
        parameters: the parameters, none of which is in another group of the same module.
        lr_multiplier: factor on the base learning rate.
        weight_decay: whether weight decay applies.
    """

    parameters: tuple[nn.Parameter, ...]
    lr_multiplier: float = 1.0
    weight_decay: bool = False


def _first(stream: Stream) -> Tensor:
    return stream if isinstance(stream, Tensor) else stream[0]


class Connection(StreamModule, abc.ABC):
    """Joins one sublayer to the stream and owns that sublayer's norms.

    Attributes:
        recompute: whether what its read and write keep for backward is made again there, and with whose:
            ``"starts"`` a segment of sublayers or ``"joins"`` it. Set by :meth:`Scheme.build`. A compiled
            block decides that itself, so there it has no effect.
    """

    recompute: Recompute = "off"

    @abc.abstractmethod
    def read(self, stream: Stream) -> tuple[Tensor, Context]:
        """Return what the branch sees, ``[batch, pos, width]``, and the context for :meth:`write`."""

    @abc.abstractmethod
    def write(self, stream: Stream, update: Tensor, context: Context) -> Stream:
        """Return the new stream from the old one and the branch's output ``[batch, pos, width]``."""

    @abc.abstractmethod
    def linearize(self, stream: Stream, update: Tensor, context: Context) -> AffineStep:
        """Return the step that :meth:`write` would make, with its coefficients frozen."""

    def mixing_matrices(self, stream: Stream) -> list[MixingMatrix]:
        """Return the matrices by which this step, at ``stream``, carries parts of it into one another.

        For `mainstem check` and for people; none for a stream that is one tensor ``[batch, pos, width]``.
        """
        return []

    def read_weights(self, stream: Stream) -> Tensor | None:
        """Return the weights of the sum of parts of ``stream`` that this step reads, before its norm.

        ``[batch, pos, parts]`` or ``[parts]``; a part is a stream or an entry of a history. None where what
        it reads is no such sum, or the scheme does not say.
        """
        return None

    def reset_parameters(self) -> None:
        """Draw the initial values again: norms to gain 1 and bias 0.

        A connection that owns anything else, or starts its norms elsewhere, extends this; it uses
        ``torch.nn.init`` functions, which a loader can keep away from what a checkpoint holds.
        """
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm | UnitOffsetRMSNorm):
                module.reset_parameters()

    def parameter_groups(self) -> list[ParameterGroup]:
        """Partition this connection's parameters; norms, and so all of them here, are not decayed."""
        parameters = tuple(self.parameters())
        return [ParameterGroup(parameters)] if parameters else []

    def forward(self, stream: Stream, branch: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Stream:
        """Run ``branch`` (any module ``[batch, pos, width]`` -> the same) inside this connection.

        The branch reads in its own dtype and what it returns is written in the stream's; see `StreamModule`.
        Autocast is the branch's alone: coefficients and the stream are not cast.
        """

        def run(read: Tensor) -> Tensor:
            return self.stream_of(branch(self.branch_of(read), *args, **kwargs))

        first = _first(stream)
        kind = first.device.type
        if not torch.is_autocast_enabled(kind):
            return self._sublayer(stream, run)
        dtype = torch.get_autocast_dtype(kind)

        def run_cast(read: Tensor) -> Tensor:
            with torch.autocast(kind, dtype=dtype):
                return run(read).to(first.dtype)

        with torch.autocast(kind, enabled=False):
            return self._sublayer(stream, run_cast)

    def _sublayer(self, stream: Stream, run: Callable[[Tensor], Tensor]) -> Stream:
        if self.recompute != "off" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return run_recomputed(self, self.recompute, stream, run)
        read, context = self.read(stream)
        return self.write(stream, run(read), context)


class Trunk(StreamModule):
    """A whole stack's connections, with the way into the stream and out of it.

    ``expand`` turns the embedding into the stream; ``connections[i]`` joins sublayer ``i``; ``collapse``
    turns the last stream into ``[batch, pos, width]``; ``final_norm`` is what the scheme wants before the
    head (the identity where the stream is already normed). This class is the single-stream trunk.
    """

    def __init__(self, connections: Sequence[Connection], final_norm: nn.Module):
        super().__init__()
        self.connections = nn.ModuleList(connections)
        self.final_norm = final_norm

    def expand(self, x: Tensor) -> Stream:
        """``[batch, pos, width]`` -> Stream. Linear."""
        return x

    def collapse(self, stream: Stream) -> Tensor:
        """Stream -> ``[batch, pos, width]``, before the final norm."""
        assert isinstance(stream, Tensor)
        return stream

    def collapse_offset(self) -> Tensor | None:
        """Return what :meth:`collapse` adds whatever the stream is (the biases of its norms), or None."""
        return None

    def linearize_collapse(self, stream: Stream) -> Callable[[Stream], Tensor]:
        """Return ``collapse`` less its offset as a linear map with coefficients frozen at ``stream``."""
        return self.collapse

    def enter(self, x: Tensor) -> Stream:
        """``[batch, pos, width]`` in the model's dtype -> Stream in its own."""
        return self.expand(self.stream_of(x))

    def leave(self, stream: Stream, keep_last: int = 0) -> Tensor:
        """Stream -> what the head reads, ``[batch, pos, width]`` in the model's dtype.

        Args:
            stream: after the last sublayer.
            keep_last: that many last positions only; 0 for all.
        """
        with torch.autocast(_first(stream).device.type, enabled=False):
            return self.branch_of(self.final_norm(self.collapse(stream)[:, -keep_last:]))

    def release_connections(self) -> list[Connection]:
        """Hand the connections over to a caller that registers each inside its own block.

        FSDP and per-block compile wrap a block together with its connections, so a transformer owns them
        there; the trunk keeps the way in, the way out and the final norm.
        """
        connections = [c for c in self.connections if isinstance(c, Connection)]
        del self.connections
        return connections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme(abc.ABC):
    """Builds the connections of a whole stack. A scheme is data: options in fields, no tensors.

    Attributes:
        name: what :func:`make_scheme` and a config call it.
        family: the shelf it stands on: ``"norm placement"``, ``"branch scaling"``, ``"gates"``,
            ``"depth reads"``, ``"wider streams"``, ``"geometry"`` or ``"none"``.
        year, paper, formula: for the table of schemes; ``paper`` is an arXiv id or a short reference,
            ``formula`` one line of plain text.
        properties: what it promises at its published defaults.
        exact_start: start as a stack that computes what plain Pre-LN computes, instead of the published way.
        no_exact_start: why that is impossible, or None where it is possible.
        refuses: feature (``"kv_cache"``, ``"activation_checkpointing"``, ``"compile"``, ``"parallel_block"``,
            ``"left_padding"``, ``"fsdp"``, ``"narrow_stream"``: below fp32, ``"recompute"``) -> why the
            scheme cannot be combined with it.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    year: ClassVar[int]
    paper: ClassVar[str]
    formula: ClassVar[str]
    properties: ClassVar[Properties]
    no_exact_start: ClassVar[str | None] = None
    refuses: ClassVar[Mapping[str, str]] = {}

    exact_start: bool = False

    def __post_init__(self) -> None:
        if self.exact_start and self.no_exact_start is not None:
            raise ConfigError(
                f"{self.name} cannot start as plain Pre-LN: {self.no_exact_start} Leave out exact_start=True."
            )

    @abc.abstractmethod
    def build_connection(self, *, index: int, width: int, num_sublayers: int, norm: NormConfig) -> Connection:
        """Build the connection of sublayer ``index`` (0-based) out of ``num_sublayers``."""

    def build_final_norm(self, *, width: int, norm: NormConfig) -> nn.Module:
        """Build the norm before the head."""
        return norm.build(width)

    def build_inner_norm(self, *, width: int, norm: NormConfig) -> nn.Module | None:
        """Build the norm that the scheme wants inside every branch, before the matrix that makes the update.

        None in all schemes but Sub-LN. A connection cannot reach there, so whoever builds the branches asks
        for it; ``width`` is that of what the matrix reads.
        """
        return None

    def build(
        self,
        *,
        width: int,
        num_sublayers: int,
        norm: NormConfig | None = None,
        stream_dtype: torch.dtype | None = None,
        recompute: int = 0,
    ) -> Trunk:
        """Build the trunk.

        Args:
            width: size of the stream's last dimension.
            num_sublayers: attention and feed-forward sublayers together (a 96-block transformer has 192; a
                parallel block is one sublayer).
            norm: kind and epsilon of the norms; RMSNorm with 1e-6 when not given.
            stream_dtype: the least dtype of the stream, whatever the branches compute in; see `StreamModule`.
            recompute: sublayers in a segment that keeps for backward its first stream and the branches'
                updates, and makes again what else its reads and writes need; 0 keeps everything. A segment
                that is one block suits whatever wraps blocks (FSDP); a longer one keeps fewer streams.

        Raises:
            ConfigError: width or num_sublayers is not positive, recompute is negative or refused.
        """
        if width < 1 or num_sublayers < 1:
            raise ConfigError(
                f"{self.name} was asked for width={width} and num_sublayers={num_sublayers}; "
                "both must be at least 1."
            )
        if recompute < 0:
            raise ConfigError(f"{self.name} was asked for recompute={recompute}; 0 means none, 2 a block.")
        if recompute and "recompute" in self.refuses:
            raise ConfigError(
                f"{self.name} cannot compute its reads and writes again: {self.refuses['recompute']} "
                "Leave out recompute."
            )
        norm = norm or NormConfig()
        connections = [
            self.build_connection(index=i, width=width, num_sublayers=num_sublayers, norm=norm)
            for i in range(num_sublayers)
        ]
        for index, connection in enumerate(connections if recompute else []):
            connection.recompute = "joins" if index % recompute else "starts"
        return self.build_trunk(connections, width=width, norm=norm).keep_stream_in(stream_dtype)

    def build_trunk(self, connections: Sequence[Connection], *, width: int, norm: NormConfig) -> Trunk:
        """Put the connections, the way in, the way out and the final norm together."""
        return Trunk(connections, self.build_final_norm(width=width, norm=norm))

    def branch_init_scale(self, num_sublayers: int) -> float:
        """Factor the scheme wants on the initial value, output and feed-forward matrices of every branch."""
        return 1.0

    def output_init_scale(self, num_sublayers: int) -> float:
        """Further factor on the matrix that makes the update (attention output, feed-forward down).

        ``num_sublayers ** -0.5`` where writes add up, so that their sum over the stack has the size of one
        (GPT-2, Radford et al. 2019, section 2.3); 1 in schemes that norm or replace the stream at every
        write.
        """
        return num_sublayers**-0.5
