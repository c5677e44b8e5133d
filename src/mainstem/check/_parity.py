"""Two ways to the same numbers: train and eval, compiled and eager, saved and loaded, plain and joined."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from mainstem.check._growth import loss_of
from mainstem.check._subject import (
    Model,
    Subject,
    difference,
    seeded,
    shake,
    silence_dropout,
    size,
    tolerance,
)
from mainstem.check.report import Finding, Outcome, Passed, Skipped
from mainstem.check.stack import ResidualStack

STEPS = 3
"""Steps in which a parameter must get a gradient: at the first, what lies behind a gate at 0 gets none."""
RATE = 0.1
EXACT_START = 1e-5
"""Distance from plain Pre-LN, fp32, that a claimed exact start may have."""
SEEDS = 17
"""Seeds under which train mode must be the same to count as not random: rare events show under some."""
COMPILED = 10.0
"""Times `tolerance`: other kernels round in another order, at every operation of the model."""


def check_start(subject: Subject) -> Outcome:
    """Compare a stack with plain Pre-LN around the same branches."""
    model = subject.build(subject.config.depths[-1]).eval()
    stack = model.inner
    if not isinstance(stack, ResidualStack):
        reason = "a whole model has no plain twin; give the connection as a mainstem.check.ResidualStack"
        return Skipped(kind="start-distance", reason=reason)
    depth, given = subject.config.depths[-1], subject.inputs()
    out = subject.run(model, given).double()
    with torch.no_grad():
        plain = stack.plain(given).double()
    apart = float((out - plain).norm() / plain.norm())
    if stack.exact_start and not apart <= EXACT_START:
        return Finding(
            kind="start-distance",
            figure=apart,
            where="the whole stack",
            depth=depth,
            says=f"the stack claims to start as plain Pre-LN, but its output is relatively {apart:.2g} away.",
        )
    says = f"relative distance of the output from plain Pre-LN around the same branches at depth {depth}"
    return Passed(
        kind="start-distance", figure=apart, says=says + ("" if stack.exact_start else " (no claim made)")
    )


def check_gradients(subject: Subject) -> list[Outcome]:
    """Train a few steps, as built and with gates moved, and look which parameters never get a gradient."""
    depth, given = subject.config.depths[0], subject.inputs(tokens=4 * subject.config.tokens)
    largest: dict[str, float] = {}
    for weights in ("as built", "moved"):
        model = subject.build(depth).train()
        if weights != "as built":
            shake(model)
        for step in range(STEPS):
            model.zero_grad(set_to_none=True)
            with seeded(subject.config.seed + step):
                loss_of(model(given)).backward()
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    seen = 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
                    largest[name] = max(largest.get(name, 0.0), seen)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(RATE * parameter.grad)
    dead = [name.removeprefix("inner.") for name, seen in largest.items() if seen == 0.0]
    if not dead:
        says = f"each of {len(largest)} parameters gets a gradient in {STEPS} steps; smallest maximum"
        return [Passed(kind="dead-parameter", figure=min(largest.values(), default=None), says=says)]
    return [
        Finding(
            kind="dead-parameter",
            figure=0.0,
            where=dead[0] + (f" and {len(dead) - 1} more" if len(dead) > 1 else ""),
            depth=depth,
            says=f"{len(dead)} of {len(largest)} parameters got no gradient in {STEPS} training steps.",
            details={"parameters": dead},
        )
    ]


def check_modes(subject: Subject) -> Outcome:
    """Compare train mode, with dropout silenced, with eval mode."""
    depth, given = subject.config.depths[0], subject.inputs()

    def model(train: bool) -> Model:
        made = subject.build(depth)
        silence_dropout(made)
        return made.train(train)

    evaluated, trained = (subject.run(model(train), given) for train in (False, True))
    apart = float(difference(evaluated, trained).max())
    if apart / size(evaluated) <= tolerance(evaluated):
        return Passed(kind="train-eval", figure=apart, says="train and eval mode agree, dropout set to 0")
    others: list[Tensor] = []
    for seed in range(1, SEEDS):
        with seeded(subject.config.seed + seed), torch.no_grad():
            others.append(model(True)(given))
    if any(float(difference(trained, other).max()) > 0 for other in others):
        reason = "train mode is random by another way than attributes named dropout, so it cannot be compared"
        return Skipped(kind="train-eval", reason=reason)
    return Finding(
        kind="train-eval",
        figure=apart,
        where=f"depth {depth}",
        depth=depth,
        says=f"train and eval mode differ by up to {apart:.2g}, with dropout set to 0 and nothing random.",
    )


def check_compiled(subject: Subject) -> Outcome:
    """Compare torch.compile (``aot_eager``: dynamo and autograd traced, eager kernels) with eager."""
    depth, given = subject.config.depths[0], subject.inputs()
    eager = _outputs_and_gradients(subject, subject.build(depth).eval(), given)
    torch.compiler.reset()
    compiled_model = subject.build(depth).eval()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled_model.compile(backend="aot_eager")
            compiled = _outputs_and_gradients(subject, compiled_model, given)
    except Exception as error:
        return Finding(
            kind="compile",
            figure=None,
            where=f"depth {depth}",
            depth=depth,
            says=f"torch.compile(backend='aot_eager') raises {type(error).__name__}: {_first_line(error)}",
        )
    finally:
        torch.compiler.reset()
    worst, place, limit = 0.0, "output", COMPILED * tolerance(eager["output"])
    scale = max(size(t) for name, t in eager.items() if name != "output") if len(eager) > 1 else 1.0
    for name, before in eager.items():
        apart = float(difference(before, compiled[name]).max())
        relative = apart / (size(before) if name == "output" else scale)
        if relative > worst and not (
            place == "output" and worst > limit
        ):  # what is wrong there is said first
            worst, place = relative, name
    if worst <= limit:
        says = "torch.compile (aot_eager) gives the eager outputs and gradients; largest relative difference"
        return Passed(kind="compile", figure=worst, says=says)
    return Finding(
        kind="compile",
        figure=worst,
        where=place,
        depth=depth,
        says=f"torch.compile (aot_eager) gives another {place} than the eager run: {worst:.2g} of its size.",
    )


def _outputs_and_gradients(subject: Subject, model: Model, given: Tensor) -> dict[str, Tensor]:
    with seeded(subject.config.seed):
        out = model(given)
        loss_of(out).backward()
    found = {"output": out.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found["gradient of " + name.replace("_orig_mod.", "").removeprefix("inner.")] = parameter.grad
    return found


def check_saved(subject: Subject) -> Outcome:
    """Save through safetensors, load into a module of another seed, and compare to the bit."""
    depth, given = subject.config.depths[0], subject.inputs()
    model, fresh = subject.build(depth), subject.build(depth, seed=subject.config.seed + 1)
    shake(model)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            save_model(model.inner, str(path))
            load_model(fresh.inner, str(path))
    except Exception as error:
        return Finding(
            kind="save-load",
            figure=None,
            where="state_dict()",
            depth=depth,
            says="it cannot be saved and loaded through safetensors: "
            f"{type(error).__name__}: {_first_line(error)}",
        )
    before, after = (subject.run(m.eval(), given) for m in (model, fresh))
    apart = float(difference(before, after).max())
    if apart == 0.0:
        says = "saved (safetensors) and loaded into a module of another seed, it gives the same to the bit"
        return Passed(kind="save-load", figure=apart, says=says)
    return Finding(
        kind="save-load",
        figure=apart,
        where="state_dict()",
        depth=depth,
        says=f"saved and loaded into a fresh module, its outputs differ by up to {apart:.2g}: something "
        "random or trained is not in its state.",
    )


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
