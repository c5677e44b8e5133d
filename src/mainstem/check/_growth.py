"""How the stream grows, and at which depth something is no longer finite."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mainstem.check._subject import Model, Subject, seeded, watched
from mainstem.check.report import Finding, Outcome, Passed, Skipped
from mainstem.check.stack import ResidualStack
from mainstem.errors import StreamNotFoundError
from mainstem.measure.events import BlockEvent, Reducer
from mainstem.observe import find_stream, record

GROWTH = 1.2
"""Growth per sublayer, over the upper half of the stack, from which it counts as exponential ..."""
LEAST_GROWTH = 4.0
"""... provided the upper half grows by this at least: a plain sum of writes at most doubles over it. It must
go on over the last quarter too: what is added again and again (skips from below) grows in proportion to the
depth, by less and less a sublayer."""
FEWEST = 8
"""Sublayers needed to tell exponential growth from what the first writes add to a small embedding."""


@dataclasses.dataclass(frozen=True)
class _Profile:
    """Norms of the stream in one pass.

    Attributes:
        norms: before the first sublayer and after each; fp64.
        places: name of each sublayer.
    """

    norms: list[float]
    places: list[str]

    @property
    def upper_half(self) -> list[float]:
        finite = next((i for i, n in enumerate(self.norms) if not math.isfinite(n)), len(self.norms))
        return self.norms[:finite][(finite - 1) // 2 :]

    @property
    def growth(self) -> float:
        """Geometric mean of the growth per sublayer over the upper half of what is finite."""
        return _rate(self.upper_half)

    @property
    def is_exponential(self) -> bool:
        half = self.upper_half
        return (
            len(self.places) >= FEWEST
            and min(self.growth, _rate(half[len(half) // 2 :])) > GROWTH
            and half[-1] > LEAST_GROWTH * half[0]
        )


def _rate(norms: list[float]) -> float:
    """Geometric mean of the growth per step."""
    if len(norms) < 2 or not norms[0] > 0:
        return 1.0
    return (norms[-1] / norms[0]) ** (1 / (len(norms) - 1))


def check_growth(subject: Subject) -> Outcome:
    """Measure the stream's norm after each sublayer at every depth.

    A finding is growth that goes on: what the first writes add to a small embedding looks alike in a shallow
    stack, so every deeper one must show it too.
    """
    smallest: tuple[_Profile, int] | None = None
    profile = _Profile([], [])
    for depth in subject.config.depths:
        try:
            profile = _profile(subject, depth)
        except StreamNotFoundError:
            return _growth_of_outputs(subject)
        smallest = (smallest or (profile, depth)) if profile.is_exponential else None
    if smallest is not None:
        return _finding(*smallest, "the stream")
    if len(profile.places) < FEWEST:
        reason = f"{len(profile.places)} sublayers are too few to tell; {FEWEST} are needed"
        return Skipped(kind="growth", reason=reason)
    return Passed(
        kind="growth",
        figure=profile.growth,
        says=f"growth per sublayer over the upper half of {len(profile.places)} sublayers; "
        f"the norm goes from {profile.norms[0]:.3g} to {profile.norms[-1]:.3g}",
    )


def _finding(profile: _Profile, depth: int, of: str, per: str = "sublayer") -> Finding:
    half = profile.upper_half
    steps = [b / a for a, b in itertools.pairwise(half)]
    place = max(range(len(steps)), key=lambda i: steps[i])
    last = profile.norms[: profile.norms.index(half[-1]) + 1]
    return Finding(
        kind="growth",
        figure=profile.growth,
        where=profile.places[len(last) - 1 - len(steps) + place],
        depth=depth,
        says=f"{of} grows by a factor of {profile.growth:.3g} per {per}: its norm goes from "
        f"{last[0]:.3g} to {last[-1]:.3g} in {len(last) - 1} {per}s.",
        details={"norms": profile.norms},
    )


def _growth_of_outputs(subject: Subject) -> Outcome:
    """Without a stream in the data flow: norms of the outputs of all modules of one class, in order of calls.

    Pre-normed branches give outputs of one size, so a class that the stream passes through shows its growth.
    """
    smallest: dict[str, tuple[_Profile, int]] = {}
    profiles: dict[str, _Profile] = {}
    for depth in subject.config.depths:
        profiles = _output_profiles(subject, depth)
        growing = {of: p for of, p in profiles.items() if p.is_exponential}
        smallest = {of: smallest.get(of, (p, depth)) for of, p in growing.items()}
    if not profiles:
        reason = "the data flow shows no stream, and no class of module is called often enough"
        return Skipped(kind="growth", reason=reason)
    name = max(profiles, key=lambda of: (of in smallest, profiles[of].growth))
    if name in smallest:
        return _finding(*smallest[name], f"the output of {name}", "call")
    return Passed(
        kind="growth",
        figure=profiles[name].growth,
        says="the data flow shows no stream, so outputs of modules of one class were compared; fastest is "
        f"{name}: growth per call over the upper half of {len(profiles[name].places)} calls",
    )


def _output_profiles(subject: Subject, depth: int) -> dict[str, _Profile]:
    """Return, for each class of module and shape of output that comes up often enough, its norms."""
    model, given = subject.build(depth).eval(), subject.inputs()
    profiles: dict[tuple[str, torch.Size], _Profile] = {}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            leaf = output[0] if isinstance(output, tuple) and output else output
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim >= 3:
                profile = profiles.setdefault((type(module).__name__, leaf.shape), _Profile([], []))
                profile.norms.append(_norm(leaf))
                profile.places.extend([name] if len(profile.norms) > 1 else [])

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in watched(model)]
    subject.run(model, given)
    for handle in handles:
        handle.remove()
    return {of: profile for (of, _), profile in profiles.items() if len(profile.places) >= FEWEST}


def _profile(subject: Subject, depth: int) -> _Profile:
    model, given = subject.build(depth).eval(), subject.inputs()
    stack = model.inner
    if isinstance(stack, ResidualStack):
        with seeded(subject.config.seed), torch.no_grad():
            norms = [_norm(state) for state in stack.states(given)]
        return _Profile(norms, [f"connections.{i}" for i in range(len(norms) - 1)])
    inputs = {"token_ids": given}
    with seeded(subject.config.seed), torch.no_grad():
        found = find_stream(model, inputs)
        norms = _Norms()
        record(model, inputs, found, [norms])
    places = ["+".join(w.module for w in site.writes).replace("inner.", "") for site in found.sites]
    return _Profile(norms.norms, places)


class _Norms(Reducer):
    """Norm of the whole state before the first sublayer and after each."""

    name = "check_norms"

    def __init__(self) -> None:
        self.norms: list[float] = []

    def update(self, event: BlockEvent) -> None:
        if event.block == 0:
            self.norms.append(_norm(event.before))
        *inner, _ = event.sublayers
        self.norms += [_norm(s.after) for s in inner] + [_norm(event.after)]

    def merge(self, other: Any) -> None:
        self.norms += other.norms

    def result(self) -> list[float]:
        return self.norms


def _norm(stream: Any) -> float:
    """Root mean square of the norms of a stream's tensors, so that a history does not count as growth."""
    tensors = [t for t in pytree.tree_leaves(stream) if isinstance(t, Tensor) and t.is_floating_point()]
    squares = [float(t.detach().double().square().sum()) for t in tensors]
    return math.sqrt(sum(squares) / max(1, len(squares)))


def check_finite(subject: Subject) -> list[Outcome]:
    """Run forward and backward at every depth and look for the first that is not finite."""
    outcomes: list[Outcome] = []
    first: dict[str, Finding] = {}
    for depth in subject.config.depths:
        model, given = subject.build(depth).train(), subject.inputs()
        where = _forward_place(subject, model, given)
        if where is not None and "forward" not in first:
            first["forward"] = _not_finite(
                "forward", depth, where, "an output of the forward pass is not finite"
            )
        if where is None and "backward" not in first:
            where = _backward_place(subject, model, given)
            if where is not None:
                first["backward"] = _not_finite("backward", depth, where, "a gradient is not finite")
    outcomes += first.values()
    if not outcomes:
        depths = ", ".join(map(str, subject.config.depths))
        says = f"outputs and gradients are finite at depths {depths}; the figure is the deepest"
        outcomes.append(Passed(kind="non-finite", figure=float(subject.config.depths[-1]), says=says))
    return outcomes


def _not_finite(phase: str, depth: int, where: str, says: str) -> Finding:
    return Finding(
        kind="non-finite",
        figure=float(depth),
        where=where,
        depth=depth,
        says=f"{says} from depth {depth} on.",
        details={"phase": phase},
    )


def _forward_place(subject: Subject, model: Model, given: Tensor) -> str | None:
    """Return the first module whose output is not finite, or None where the model's is."""
    bad: list[str] = []

    def hook(name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            leaves = [
                t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()
            ]
            if not bad and any(not t.isfinite().all() for t in leaves):
                bad.append(name)

        return look

    handles = [module.register_forward_hook(hook(name)) for name, module in watched(model)]
    out = subject.run(model, given)
    for handle in handles:
        handle.remove()
    return None if out.isfinite().all() else (bad or ["output"])[0]


def _backward_place(subject: Subject, model: Model, given: Tensor) -> str | None:
    """Return the parameter whose gradient is not finite, the last one in the model."""
    with seeded(subject.config.seed):
        loss_of(model(given)).backward()
    names = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return names[-1].removeprefix("inner.") if names else None


def loss_of(out: Tensor) -> Tensor:
    """A loss that asks something different of every output: the mean of output times fixed random numbers."""
    generator = torch.Generator().manual_seed(3)
    return (out * torch.randn(out.shape, generator=generator).to(out)).mean()
