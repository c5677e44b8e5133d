"""What is checked: built afresh for every probe, with fixed seeds, and called in one way."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mainstem.check.report import KINDS
from mainstem.check.stack import ResidualStack
from mainstem.errors import ConfigError

Factory = Callable[..., Any]

SHAKE = 0.1
"""How far parameters of one value throughout (gates at 0, gains at 1) are moved: they could hide a fault."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """How a check looks.

    Attributes:
        depths: what the factory is called with, smallest first.
        tokens: positions in a sequence.
        batch: sequences.
        width: passed to the factory as ``width=`` where given.
        seed: of weights and inputs.
        kinds: what is looked for, of `KINDS`.
    """

    depths: tuple[int, ...] = (2, 4, 8, 16, 24)
    tokens: int = 12
    batch: int = 2
    width: int | None = None
    seed: int = 0
    kinds: tuple[str, ...] = tuple(KINDS)

    def __post_init__(self) -> None:
        if not self.depths or any(d < 1 for d in self.depths):
            raise ConfigError(f"depths {list(self.depths)} must be one or more numbers of at least 1.")
        if self.tokens < 2 or self.batch < 2:
            raise ConfigError(
                f"a check with {self.tokens} token(s) in {self.batch} sequence(s) was asked for; at least 2 "
                "of each are needed."
            )
        if unknown := sorted(set(self.kinds) - set(KINDS)):
            raise ConfigError(
                f"there is no check {', '.join(map(repr, unknown))}; the checks are: {', '.join(KINDS)}."
            )
        if self.width is not None and self.width < 1:
            raise ConfigError(f"width {self.width} must be at least 1.")
        object.__setattr__(self, "depths", tuple(sorted(set(self.depths))))


def parse_depths(text: str) -> tuple[int, ...]:
    """Return the numbers of ``"2,8,24"``.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"depths {text!r} are no numbers with commas between; expected such as 2,8,24."
        ) from None


class Model(nn.Module):
    """Somebody's model under one signature: token ids (or a stack's ``x``) to ``[batch, pos, out]``."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, token_ids: Tensor) -> Tensor:
        """Run it and take the logits out of whatever it returns."""
        return logits_of(self.inner(token_ids))


def logits_of(result: Any) -> Tensor:
    """Return the logits: the result itself, its ``logits``, or the first of a tuple."""
    for found in (result, getattr(result, "logits", None)):
        if isinstance(found, Tensor):
            return found
    if isinstance(result, dict) and isinstance(result.get("logits"), Tensor):
        return result["logits"]
    if isinstance(result, tuple | list) and result and isinstance(result[0], Tensor):
        return result[0]
    raise ConfigError(
        f"the model returned {type(result).__name__}; expected logits [batch, pos, vocab] as a tensor, under "
        "'logits', or first in a tuple."
    )


class Subject:
    """A factory, asked for fresh modules.

    Attributes:
        is_stack: whether it gives `ResidualStack`.
        vocab: for a model, how many logits it has; ids are drawn from ``1 .. vocab - 1`` (0 is padding in
            many).
    """

    def __init__(self, factory: Factory, config: CheckConfig):
        self.factory, self.config = factory, config
        self.is_stack, self.vocab = False, 0
        model = self.build(config.depths[0])
        self.is_stack = isinstance(model.inner, ResidualStack)
        if not self.is_stack:
            ids = torch.ones(config.batch, config.tokens, dtype=torch.long)
            out = self._first_run(model, ids)
            self.vocab = out.shape[-1]
        out = self._first_run(model, self.inputs())
        if out.ndim != 3 or out.shape[:2] != (config.batch, config.tokens):
            raise ConfigError(
                f"for an input of {config.batch} x {config.tokens} positions the factory's module returned "
                f"{list(out.shape)}; expected [batch, pos, vocab] (or [batch, pos, width] from a stack)."
            )

    def _first_run(self, model: Model, given: Tensor) -> Tensor:
        try:
            return self.run(model.eval(), given)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            what = "token ids" if given.dtype == torch.long else "values"
            hint = " If it has fewer positions, give --tokens." if isinstance(error, IndexError) else ""
            raise ConfigError(
                f"the factory's module cannot be run on {list(given.shape)} {str(given.dtype)[6:]} {what} "
                f"({brief(error)}).{hint}"
            ) from error

    def build(self, depth: int, seed: int | None = None) -> Model:
        """Build it for ``depth``, its random weights decided by ``seed``."""
        options = {} if self.config.width is None else {"width": self.config.width}
        with seeded(self.config.seed if seed is None else seed):
            try:
                made = self.factory(depth, **options)
            except (Exception, SystemExit) as error:
                raise ConfigError(
                    f"the factory, called with {_call(depth, options)}, raised {brief(error)}"
                ) from error
        if not isinstance(made, nn.Module):
            given = (
                "nothing; does it return the module?"
                if made is None
                else f"the class {made.__name__}, not an instance of it"
                if isinstance(made, type)
                else f"a {type(made).__name__}"
            )
            raise ConfigError(
                f"the factory gave {given}; expected an nn.Module: a causal model, or a "
                "mainstem.check.ResidualStack."
            )
        if any(t.is_meta for t in (*made.parameters(), *made.buffers())):
            raise ConfigError(
                "the factory's module has parameters on the meta device, which hold no values; build it on "
                "the CPU."
            )
        config = getattr(made, "config", None)
        if "use_cache" in inspect.signature(made.forward).parameters and hasattr(config, "use_cache"):
            config.use_cache = False  # pyright: ignore[reportOptionalMemberAccess]
        return Model(made)

    def inputs(self, *, seed: int = 0, tokens: int | None = None) -> Tensor:
        """Return ids ``[batch, pos]``, or ``x`` ``[batch, pos, width]`` for a stack."""
        shape = (self.config.batch, tokens or self.config.tokens)
        generator = torch.Generator().manual_seed(1000 + self.config.seed + seed)
        if not self.is_stack:
            return torch.randint(min(1, self.vocab - 1), self.vocab, shape, generator=generator)
        stack = self.build(self.config.depths[0]).inner
        assert isinstance(stack, ResidualStack)
        dtype = next((p.dtype for p in stack.parameters()), torch.float32)
        return torch.randn(*shape, stack.width, generator=generator).to(dtype)

    def other(self, given: Tensor, row: int | slice, position: int | slice) -> Tensor:
        """Return a copy of ``given`` with other content there."""
        changed = given.clone()
        part = changed[row, position]
        if self.is_stack:
            generator = torch.Generator().manual_seed(7 + self.config.seed)
            changed[row, position] = torch.randn(part.shape, generator=generator).to(part.dtype)
        else:
            low, span = min(1, self.vocab - 1), max(1, self.vocab - 1)
            changed[row, position] = low + (part - low + span // 2) % span
        return changed

    def run(self, model: nn.Module, given: Tensor) -> Tensor:
        """Run it without gradients, random numbers the same every time."""
        with seeded(self.config.seed), torch.no_grad():
            return model(given)


def brief(error: BaseException) -> str:
    """Return an exception in one line: its class and the first line of what it says."""
    lines = str(error).strip().splitlines()
    says = (lines[0].rstrip(".") + (" ..." if len(lines) > 1 else "")) if lines else ""
    return f"{type(error).__name__}: {says}" if says else type(error).__name__


def _call(depth: int, options: dict[str, int]) -> str:
    return ", ".join([str(depth), *(f"{k}={v}" for k, v in options.items())])


@contextlib.contextmanager
def seeded(seed: int) -> Generator[None]:
    """Fix Python's and torch's random numbers inside the block; outside they go on as if it had not been."""
    state = random.getstate()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)


def shake(model: nn.Module, seed: int = 1) -> None:
    """Move every parameter that has one value throughout: a gate at 0 would hide what it gates."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.is_floating_point()
                and parameter.numel()
                and (parameter == parameter.flatten()[0]).all()
            ):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((SHAKE * noise).to(parameter))


def silence_dropout(model: nn.Module) -> None:
    """Set every probability of dropping something to 0: attributes of numbers whose name speaks of it."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_probability = isinstance(value, float) and 0 < value <= 1
            spoken_of = "drop" in name.lower() or (name == "p" and "drop" in type(module).__name__.lower())
            if is_probability and spoken_of:
                setattr(module, name, 0.0)


def tolerance(out: Tensor) -> float:
    """Return what rounding may do to an output, relative to its largest entry: 100 units in the last place.

    A model that sends tokens to experts multiplies matrices of other shapes when a token changes, so even
    without any leak the last bits may move.
    """
    return min(100 * torch.finfo(out.dtype).eps, 0.05)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Return ``|a - b|`` in fp64: 0 where both are nan or the same infinity, inf where only one is finite."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=float("inf")))


def size(out: Tensor) -> float:
    """Return the largest finite ``|entry|``, at least the smallest normal number."""
    finite = out.double()[out.isfinite()].abs()
    return max(float(finite.max()) if finite.numel() else 0.0, torch.finfo(out.dtype).tiny)


def watched(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the subject with the names its author knows."""
    for name, module in model.named_modules():
        if name.startswith("inner."):
            yield name.removeprefix("inner."), module
