"""Which write said what: a token's logit as an exact sum over the ledger."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mainstem.errors import BooksError, ConfigError, StreamNotFoundError
from mainstem.observe._frozen import Call, apply_frozen
from mainstem.observe._rules import (
    ADDITIVE,
    CONTRACTION,
    HEAVY,
    LIKE_ANOTHER,
    NORMS,
    PRODUCT,
    REDUCTION,
    SHAPE,
)
from mainstem.observe._tail import Slot, Tail, Taped
from mainstem.observe._trace import function_name
from mainstem.observe.ledger import Ledger

_ENTRY_BY_ENTRY = SHAPE | frozenset(["add", "sub", "mul", "div", "tanh", "clamp", "softplus", "sigmoid"])
"""What may follow the head: each logit goes its own way."""


@dataclasses.dataclass(frozen=True)
class Attribution:
    """Logits of one position as sums over the ledger's rows.

    Attributes:
        labels: those of the ledger, with ``bias`` always there and last.
        tokens: the tokens whose logits these are.
        parts: ``[component, token]`` fp64, on the CPU, in logits before any soft-cap or logit scale.
        before: ``[token]`` fp64: the model's own logits before any soft-cap or logit scale.
        after: ``[token]`` fp64: what the model returns.
        after_sum: ``[token]`` fp64: what the model's soft-cap and logit scale make of the sum of the parts.
        transforms: names of the calls between ``before`` and ``after``.
        dtype: the narrowest of the final state and of what the tail makes of it (Llama's norm works in fp32
            whatever the model's dtype).
    """

    labels: tuple[str, ...]
    tokens: tuple[int, ...]
    parts: Tensor
    before: Tensor
    after: Tensor
    after_sum: Tensor
    transforms: tuple[str, ...]
    dtype: torch.dtype

    @property
    def error(self) -> float:
        """Largest error of a sum, before or after, beside the sizes of what was summed, ``sum |part|``."""
        size = self.parts.abs().sum(0)
        stretched = size * (self.after / self.before).abs().clamp_min(1.0).nan_to_num(1.0, 1.0, 1.0)
        errors = torch.stack(
            [(self.parts.sum(0) - self.before).abs() / size, (self.after_sum - self.after).abs() / stretched]
        )
        return float(errors.max())

    def check(self, tolerance: float) -> Attribution:
        """Return the attribution itself.

        Raises:
            BooksError: the parts do not add up to the model's own logits within ``tolerance``, or 8 units of
                rounding of the narrowest dtype on the way where that is more.
        """
        tolerance = max(tolerance, 8 * torch.finfo(self.dtype).eps)
        if not self.error <= tolerance:
            raise BooksError(
                f"the attribution does not add up: its {len(self.labels)} parts differ from the model's own "
                f"logits by {self.error:.2e} of their size, more than the {tolerance:.0e} allowed; none is "
                "given."
            )
        return self


def attribute(
    ledger: Ledger, tail: Tail, output: Tensor, tokens: Sequence[int], *, sequence: int, position: int
) -> Attribution:
    """Say how much of each token's logit each row of the ledger is.

    ``part_c(t) = A(c) . W_U[t]``: the final norm's scale is frozen at its own value at that position, for a
    LayerNorm the mean is taken off each part, and what the ledger calls ``bias``, the norm's bias and the
    head's are one row (direct logit attribution, Wang et al. 2022, arXiv 2211.00593, with the biases kept).
    The sum is the logit before a soft-cap (Gemma 2) and before a logit scale (Granite, Cohere). Costs the
    tail three times and its backward pass once a token.

    Args:
        ledger: of one pass.
        tail: of the same pass.
        output: its logits, ``[batch, pos, vocab]``.
        tokens: ids of the tokens.
        sequence: row of the batch; ``position``: column, padding counted.

    Raises:
        StreamNotFoundError: between the final state and the logits lies more than what is linear once norms
            are frozen, a head, and functions of one logit each, as in the heads of masked language models.
        ConfigError: a token has no logit.
    """
    vocab = output.shape[-1]
    if wrong := [token for token in tokens if not 0 <= token < vocab]:
        raise ConfigError(f"token {wrong[0]} has no logit; the model has {vocab}.")
    frozen = _FrozenTail(tail, ledger.final.reshape(tuple(tail.shape)))
    place = sequence * output.shape[1] + position

    def logits(before: Tensor) -> Tensor:
        return before.reshape(-1, before.shape[-1])[place, list(tokens)]

    with torch.enable_grad():
        state = frozen.state.detach().clone().requires_grad_()
        found = logits(frozen.linear(state))
        slopes = [torch.autograd.grad(f, state, retain_graph=True)[0] for f in found]
    with torch.no_grad():
        constant = logits(frozen.linear(torch.zeros_like(frozen.state))).double().cpu()
        slope = torch.stack([s.reshape(ledger.final.shape)[sequence, position] for s in slopes])
        rows = ledger.rows[:, sequence, position].flatten(1).double()
        parts = (rows @ slope.flatten(1).double().T).cpu()
        labels = ledger.labels if ledger.labels[-1] == "bias" else (*ledger.labels, "bias")
        parts = parts if len(labels) == len(parts) else torch.cat([parts, torch.zeros_like(parts[:1])])
        parts[-1] += constant
        summed = frozen.before.clone(memory_format=torch.contiguous_format)
        summed.reshape(-1, summed.shape[-1])[place, list(tokens)] = parts.sum(0).to(summed)
        after_sum = frozen.rest(summed)
    return Attribution(
        labels=labels,
        tokens=tuple(tokens),
        parts=parts,
        before=logits(frozen.before).double().cpu(),
        after=output[sequence, position, list(tokens)].detach().double().cpu(),
        after_sum=logits(after_sum).double().cpu(),
        transforms=tuple(name for name in frozen.rest_names if name not in SHAPE),
        dtype=frozen.narrowest,
    )


@dataclasses.dataclass(frozen=True)
class _Step:
    """A call of the tail with the values of the pass, the slots it was given and those it makes."""

    call: Call
    given: dict[int, int]
    makes: list[int]
    is_linear: bool


class _FrozenTail:
    """A tail in two halves: affine up to the logits (norms frozen), entry by entry from there.

    Attributes:
        state: the final state; ``before``: the logits before soft-cap and scale, both of the pass.
        rest_names: the functions that follow.
        narrowest: dtype with the coarsest rounding of all that is made.
    """

    def __init__(self, tail: Tail, state: Tensor):
        self.state = state
        self._values: dict[int, Tensor] = {0: state.clone()}
        self._linear = {0}
        self._steps = _leading_to([self._step(taped) for taped in tail.calls], tail.output)
        heads = [i for i, step in enumerate(self._steps) if step.call.name in HEAVY]
        if not heads:
            raise StreamNotFoundError(
                "the final state reaches the logits through no head, so nothing can be attributed to a token."
            )
        self._end = heads[-1]
        if not self._steps[self._end].is_linear:
            raise StreamNotFoundError(
                f"between the final state and the head lies {self._culprit(self._end)!r}, which is not "
                "linear: a logit of this model is no sum over the writes."
            )
        self._number = self._steps[self._end].makes[0]
        while self._end + 1 < len(self._steps) and self._is_bias(self._steps[self._end + 1]):
            self._end += 1
            self._number = self._steps[self._end].makes[0]
        self.before = self._values[self._number]
        self._output = tail.output
        made = [t for step in self._steps for t in step.call.made if t.is_floating_point()]
        self.narrowest = max((t.dtype for t in (state, *made)), key=lambda dtype: torch.finfo(dtype).eps)
        self.rest_names = [step.call.name for step in self._steps[self._end + 1 :]]
        self._check_rest()

    def linear(self, state: Tensor) -> Tensor:
        """Apply everything up to the logits, coefficients frozen, constants added."""
        made: dict[int, Tensor] = {0: state}
        for step in self._steps[: self._end + 1]:
            if step.is_linear:
                given = {slot: made[number] for slot, number in step.given.items() if number in made}
                made.update(
                    zip(step.makes, apply_frozen(step.call, given, constants=True, offsets=True), strict=True)
                )
        return made[self._number]

    def rest(self, before: Tensor) -> Tensor:
        """Apply what follows the logits."""
        made = {self._number: before}
        for step in self._steps[self._end + 1 :]:
            leaves = list(step.call.leaves)
            for slot, number in step.given.items():
                leaves[slot] = made[number].clone()
            args, kwargs = pytree.tree_unflatten(leaves, step.call.spec)
            out = pytree.tree_leaves(step.call.func(*args, **kwargs))
            made.update(zip(step.makes, [t for t in out if isinstance(t, Tensor)], strict=True))
        return made[self._output]

    def _step(self, taped: Taped) -> _Step:
        leaves, spec = pytree.tree_flatten((taped.args, taped.kwargs))
        given = {i: leaf.number for i, leaf in enumerate(leaves) if isinstance(leaf, Slot)}
        filled = [self._values[leaf.number] if isinstance(leaf, Slot) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        with torch.no_grad():
            call, out = Call.run(function_name(taped.func), taped.func, args, kwargs)
        made = pytree.tree_leaves(out)
        makes = [number for number in taped.makes if number is not None]
        linear = [slot for slot, n in given.items() if n in self._linear]
        is_linear = _is_linear(call.name, linear) and not _is_bent(call, linear, given)
        for number, t in zip(taped.makes, made, strict=True):
            if number is not None:
                self._values[number] = t
                (self._linear.add if is_linear else self._linear.discard)(number)
        return _Step(call, given, makes, is_linear)

    def _is_bias(self, step: _Step) -> bool:
        """Whether a call after the head still belongs to it: a bias of its own, or a change of shape."""
        return (
            step.is_linear
            and list(step.given.values()) == [self._number]
            and (step.call.name == "add" or step.call.name in SHAPE)
        )

    def _check_rest(self) -> None:
        reached = {self._number}
        for step in self._steps[self._end + 1 :]:
            if step.call.name not in _ENTRY_BY_ENTRY or not set(step.given.values()) <= reached:
                raise StreamNotFoundError(
                    f"after the head the logits go through {step.call.name!r}, which does not take each by "
                    "itself: what it makes of one sum is not known."
                )
            reached.update(step.makes)

    def _culprit(self, index: int) -> str:
        """Return the function that first was not linear on the way to a call."""
        numbers = set(self._steps[index].given.values())
        for step in reversed(self._steps[:index]):
            if numbers & set(step.makes):
                numbers |= set(step.given.values())
                # A sum or product is bent only by what it is given.
                is_cause = step.call.name not in ADDITIVE | PRODUCT | {"div"} and not step.is_linear
                if is_cause and set(step.given.values()) & self._linear:
                    return step.call.name
        return self._steps[index].call.name


def _leading_to(steps: Sequence[_Step], output: int) -> list[_Step]:
    """Return the steps that the output depends on: a pooler beside the head is none of them."""
    needed, kept = {output}, list[_Step]()
    for step in reversed(steps):
        if needed & set(step.makes):
            needed.update(step.given.values())
            kept.insert(0, step)
    return kept


def _is_bent(call: Call, linear: Sequence[int], given: Iterable[int]) -> bool:
    """Whether what is frozen was made of the state and is no norm and no mixing.

    That is a factor of its own for every entry (a gate), or a term (a write of the tail's own).
    """
    frozen = [call.leaves[slot] for slot in given if slot not in linear]
    if call.name in ADDITIVE:
        return bool(frozen)
    width = call.leaves[linear[0]].shape[-1]
    return (
        width > 1
        and call.name in PRODUCT | {"div"}
        and any(isinstance(f, Tensor) and f.ndim > 0 and f.shape[-1] == width for f in frozen)
    )


def _is_linear(name: str, linear: list[int]) -> bool:
    """Whether a call is affine in the arguments at the slots ``linear``, all others frozen."""
    if not linear:
        return False
    if name in ADDITIVE:
        return name != "setitem"
    if name in LIKE_ANOTHER:
        return 0 in linear
    if name in SHAPE or name in REDUCTION or name in NORMS or name == "div":
        return linear == [0]
    return (name in PRODUCT or name in CONTRACTION) and len(linear) == 1
