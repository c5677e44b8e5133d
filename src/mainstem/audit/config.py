"""What an audit is asked to do."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from mainstem.errors import ConfigError

QUESTIONS = {
    "books": 1,
    "growth": 2,
    "writes": 3,
    "identity": 4,
    "answer": 5,
    "damage": 6,
    "removal": 7,
    "signals": 8,
}
"""Names of the questions that an audit can be limited to, and their numbers (docs/design.md, section 8)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Every choice of an audit; all of it goes into the provenance.

    Attributes:
        model: hub id, folder, ``.gguf`` file, or shorthand such as ``"smollm2"``.
        text: file, folder, name of a dataset, or the words themselves.
        tokens: tokens of the text to use, None for all of it.
        window: tokens in a window; windows do not see each other.
        batch_size: windows in a forward pass.
        first_token: what every window begins with: ``"none"``, ``"bos"``, ``"eos"``, or a token's own text.
        pad_side: where a shorter last window is padded.
        dtype: dtype of the model's weights and of its stream.
        device: where it runs.
        revision: of a hub model.
        trust_remote_code: whether a hub model may run Python code of its own.
        lens: whether to read every state out with the model's own head (a second pass with one head a block).
        rounding_every: look at every k-th position for what a 16-bit stream would absorb; 1 is exact.
        identity_every: look at every k-th position for the nearest embedding; 1 is exact.
        sweep: whether to skip every block in turn, which costs about half as many passes as there are blocks;
            ``only`` asks for it too where it names damage or removal.
        sweep_windows: of how many of the first windows.
        probe: whether to fit linear probes of token identity, which takes a while after the last pass.
        attribute: the token whose logit after the first window is attributed to every write, or two with a
            comma between them, ``"A,B"``, for the difference; None for the model's two best tokens.
        only: names of `QUESTIONS` to answer, none for all. The pass that checks the books is always made;
            a lens, a nearest embedding and a gradient only where their question is asked.
    """

    model: str
    text: str
    tokens: int | None = 2048
    window: int = 256
    batch_size: int = 4
    first_token: str = "none"
    pad_side: Literal["right", "left"] = "right"
    dtype: str = "float32"
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    lens: bool = True
    rounding_every: int = 32
    identity_every: int = 8
    sweep: bool = False
    sweep_windows: int = 4
    probe: bool = False
    attribute: str | None = None
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 2:
            raise ConfigError(f"an audit of {self.tokens} token(s) was asked for; at least 2 are needed.")
        if self.window < 2:
            raise ConfigError(f"a window of {self.window} token(s) was asked for; it must hold at least 2.")
        for name in ("batch_size", "rounding_every", "identity_every", "sweep_windows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.pad_side not in ("right", "left"):
            raise ConfigError(f"pad_side is {self.pad_side!r}; it must be 'right' or 'left'.")

        unknown = [name for name in self.only if name not in QUESTIONS]
        if unknown:
            raise ConfigError(f"there is no question {unknown[0]!r}; it must be of {', '.join(QUESTIONS)}.")
        if self.probe and not self.asks("identity"):
            raise ConfigError("a probe belongs to the question 'identity'; name it in --only.")
        if self.attribute is not None and not self.asks("answer"):
            raise ConfigError("a token's logit belongs to the question 'answer'; name it in --only.")
        if self.sweep and self.only and not {"damage", "removal"} & set(self.only):
            raise ConfigError("a sweep answers 'damage' and 'removal'; name one of them in --only.")

    @property
    def sweeps(self) -> bool:
        """Whether blocks are skipped in turn."""
        return self.sweep or bool({"damage", "removal"} & set(self.only))

    def asks(self, question: str) -> bool:
        """Say whether a question of `QUESTIONS` is to be answered."""
        return not self.only or question in self.only

    def to_dict(self) -> dict[str, Any]:
        """Return the choices as plain values."""
        return dataclasses.asdict(self)
