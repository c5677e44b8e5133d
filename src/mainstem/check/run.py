"""All checks in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mainstem.check._growth import check_finite, check_growth
from mainstem.check._leaks import check_batch, check_future, check_repeat
from mainstem.check._parity import check_compiled, check_gradients, check_modes, check_saved, check_start
from mainstem.check._subject import CheckConfig, Factory, Subject, brief
from mainstem.check._sums import check_sums
from mainstem.check.report import KINDS, CheckReport, Finding, Outcome, Skipped
from mainstem.errors import ConfigError

Tell = Callable[[str, int, int], None]
"""Told what is done now, which step that is, and how many there are."""

_CHECKS: dict[str, Callable[[Subject], Outcome | Sequence[Outcome]]] = {
    "repeat": check_repeat,
    "future-leak": check_future,
    "batch-leak": check_batch,
    "growth": check_growth,
    "non-finite": check_finite,
    "start-distance": check_start,
    "mixing-sums": check_sums,
    "dead-parameter": check_gradients,
    "train-eval": check_modes,
    "compile": check_compiled,
    "save-load": check_saved,
}
_INSTRUMENTED = {"growth", "mixing-sums"}
"""Checks that watch every call of the module, which not every module bears."""
assert list(_CHECKS) == list(KINDS)


def check(
    factory: Factory, config: CheckConfig | None = None, *, name: str = "", tell: Tell | None = None
) -> CheckReport:
    """Run the conformance suite on somebody's model or residual connection.

    Every probe builds the module afresh with the same seeds, and the caller's random state is left alone. It
    is run as the factory made it: its dtype, its device (which must take CPU tensors), tiny sizes preferred.

    Args:
        factory: called with a depth, it gives a causal model, an ``nn.Module`` from int64 token ids
            ``[batch, pos]`` to logits ``[batch, pos, vocab]`` (or an output with ``.logits``); or a
            `ResidualStack` of that many sublayers.
        config: depths, sizes and seed.
        name: what the report calls it.
        tell: told of the progress.

    Raises:
        ConfigError: the factory gives something else, or its module does not run.
    """
    config = config or CheckConfig()
    subject = Subject(factory, config)
    outcomes: list[Outcome] = []
    chosen = [kind for kind in _CHECKS if kind in config.kinds]
    for i, kind in enumerate(chosen):
        if tell is not None:
            tell(kind, i, len(chosen))
        outcomes += _run(kind, _CHECKS[kind], subject)
    return CheckReport(
        subject=name or getattr(factory, "__qualname__", type(factory).__name__),
        is_stack=subject.is_stack,
        depths=config.depths,
        outcomes=tuple(outcomes),
    )


def _run(
    kind: str, probe: Callable[[Subject], Outcome | Sequence[Outcome]], subject: Subject
) -> Sequence[Outcome]:
    """Run one probe; a module that raises in it is a finding, unless our instruments may be the reason."""
    try:
        found = probe(subject)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        says = f"the module raised {brief(error)}"
        if kind in _INSTRUMENTED:
            return [Skipped(kind=kind, reason=says)]
        return [Finding(kind=kind, figure=None, where="this check", says=f"{says}.")]
    return [found] if isinstance(found, Finding) or not isinstance(found, Sequence) else found
