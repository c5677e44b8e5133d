"""Generators of the matrix that mixes streams: how logits become a matrix of a certain kind."""

from __future__ import annotations

import abc
import itertools
import math
from typing import Literal

import torch
from torch import Tensor, nn

from mainstem.connections._base import Promise
from mainstem.connections._policy import coefficient
from mainstem.connections._sinkhorn import Sinkhorn
from mainstem.errors import ConfigError

Generator = Literal["sinkhorn", "permutation", "kronecker", "cayley"]


class MixGenerator(nn.Module, abc.ABC):
    """Logits ``[..., num_logits]`` -> matrices ``[..., n, n]``.

    Attributes:
        num_logits: how many there are.
        promises: what holds for any logits: doubly stochastic (rows and columns), or orthogonal.
    """

    num_logits: int
    promises: frozenset[Promise] = frozenset({"rows", "columns"})

    @abc.abstractmethod
    def published_start(self) -> Tensor:
        """Return the logits its paper starts from."""

    @abc.abstractmethod
    def exact_start(self) -> Tensor:
        """Return logits of a mixing matrix other than the identity whose rows sum to 1 exactly."""

    def reset_parameters(self) -> None:
        """Nothing is learned here; what is fixed is a saved buffer."""


class SinkhornMix(MixGenerator):
    """``n^2`` logits through Sinkhorn-Knopp (arXiv 2512.24880, eq. 9): doubly stochastic, by convergence.

    Starts uniform (logits 0, as Megatron and DeepSeek-V4 in transformers do; the paper does not say).
    """

    def __init__(self, num_streams: int, sinkhorn: Sinkhorn):
        super().__init__()
        self.num_logits = num_streams**2
        self.size = num_streams
        self.sinkhorn = sinkhorn

    def forward(self, logits: Tensor) -> Tensor:
        """Make the matrix."""
        return self.sinkhorn(logits.unflatten(-1, (self.size, self.size)))

    def published_start(self) -> Tensor:
        """Uniform."""
        return torch.zeros(self.num_logits)

    def exact_start(self) -> Tensor:
        """A circulant, doubly stochastic after one division in any order; 0.71 on the diagonal at n = 4."""
        return (2.0 * torch.eye(self.size)).flatten()


class PermutationMix(MixGenerator):
    """A softmax over all ``n!`` permutation matrices (mHC-lite, arXiv 2601.05732): doubly stochastic exactly.

    Starts with logits 0 for the identity and -8 for every other (read in KromHC's repository, which ships
    mHC-lite: identity weight 0.992 at n = 4).
    """

    basis: Tensor

    def __init__(self, num_streams: int):
        super().__init__()
        if num_streams > 5:
            raise ConfigError(
                f"mixing='permutation' needs {num_streams}! = {math.factorial(num_streams)} logits; "
                "use at most 5 streams, or mixing='kronecker'."
            )
        order = torch.tensor(list(itertools.permutations(range(num_streams))))
        self.num_logits = len(order)
        self.register_buffer("basis", coefficient(torch.eye(num_streams)[order]))

    def forward(self, logits: Tensor) -> Tensor:
        """Make the matrix."""
        return torch.einsum("...k,kij->...ij", logits.softmax(-1), self.basis.to(logits.dtype))

    def published_start(self) -> Tensor:
        """Nearly the identity."""
        return torch.tensor([0.0] + [-8.0] * (self.num_logits - 1))

    def exact_start(self) -> Tensor:
        """Half the identity at n = 4, so that no other permutation starts with a vanishing gradient."""
        return torch.tensor([math.log(max(self.num_logits - 1, 1))] + [0.0] * (self.num_logits - 1))


class KroneckerMix(MixGenerator):
    """A Kronecker product of ``log2 n`` doubly stochastic 2 x 2 matrices (KromHC, arXiv 2601.21579): exact.

    Each factor is ``[[p, 1 - p], [1 - p, p]]`` with ``p`` of a softmax over two logits, (0, -8) at the start
    (read in the authors' code).
    """

    def __init__(self, num_streams: int):
        super().__init__()
        self.num_factors = num_streams.bit_length() - 1
        if num_streams < 2 or num_streams != 2**self.num_factors:
            raise ConfigError(
                f"mixing='kronecker' needs a power of 2 of at least 2 as num_streams, not {num_streams}."
            )
        self.num_logits = 2 * self.num_factors

    def forward(self, logits: Tensor) -> Tensor:
        """Make the matrix."""
        weights = logits.unflatten(-1, (self.num_factors, 2)).softmax(-1)
        factors = torch.stack([weights, weights.flip(-1)], dim=-2)
        matrix, *others = factors.unbind(-3)
        for other in others:
            matrix = matrix[..., :, None, :, None] * other[..., None, :, None, :]
            matrix = matrix.flatten(-4, -3).flatten(-2, -1)
        return matrix

    def published_start(self) -> Tensor:
        """Nearly the identity."""
        return torch.tensor([0.0, -8.0] * self.num_factors)

    def exact_start(self) -> Tensor:
        """``p`` = 0.73 in every factor."""
        return torch.tensor([1.0, 0.0] * self.num_factors)


class CayleyMix(MixGenerator):
    """``Q = (I + A)^-1 (I - A)`` with ``A`` skew-symmetric (JPmHC, arXiv 2602.18308): a rotation.

    ``n (n - 1) / 2`` logits are the entries of ``A`` above the diagonal. Rows do not sum to 1, lengths are
    kept; an eigenvalue -1 is out of reach. The paper itself was read in abstract only, the transform in
    excerpts of two ports; it starts at ``A = 0``, the identity. Departure: solved directly, where the
    paper iterates a fixed point.
    """

    promises = frozenset({"orthogonal"})
    basis: Tensor

    def __init__(self, num_streams: int):
        super().__init__()
        if num_streams < 2:
            raise ConfigError("mixing='cayley' rotates streams; give num_streams of at least 2.")
        rows, columns = torch.triu_indices(num_streams, num_streams, 1)
        self.num_logits = len(rows)
        self.size = num_streams
        basis = torch.zeros(self.num_logits, num_streams, num_streams)
        basis[torch.arange(self.num_logits), rows, columns] = 1.0
        self.register_buffer("basis", coefficient(basis - basis.mT))

    def forward(self, logits: Tensor) -> Tensor:
        """Make the matrix."""
        basis = self.basis.to(logits.dtype)
        skew = torch.einsum("...k,kij->...ij", logits, basis)
        identity = torch.eye(self.size, dtype=logits.dtype, device=logits.device)
        return torch.linalg.solve(identity + skew, identity - skew)

    def published_start(self) -> Tensor:
        """The identity."""
        return torch.zeros(self.num_logits)

    def exact_start(self) -> Tensor:
        """The identity: every row sums to 1, and streams read and written alike are told apart by it."""
        return torch.zeros(self.num_logits)


def make_generator(kind: Generator, num_streams: int, sinkhorn: Sinkhorn) -> MixGenerator:
    """Build the generator called ``kind``.

    Raises:
        ConfigError: no generator has that name, or it cannot make matrices of that size.
    """
    if kind == "sinkhorn":
        return SinkhornMix(num_streams, sinkhorn)
    kinds = {"permutation": PermutationMix, "kronecker": KroneckerMix, "cayley": CayleyMix}
    if kind not in kinds:
        raise ConfigError(f"mixing {kind!r} is not known; choose one of sinkhorn, {', '.join(kinds)}.")
    return kinds[kind](num_streams)
