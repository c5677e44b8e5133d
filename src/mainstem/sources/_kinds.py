"""What kind of language model a configuration describes, and which Auto class loads it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from mainstem.errors import SourceError

from ._extras import require


@dataclasses.dataclass(frozen=True)
class ModelKind:
    """Attributes: ``name``, what it is; ``auto_class``, the class of ``transformers`` that loads it."""

    name: Literal["causal", "masked", "encoder"]
    auto_class: str


CAUSAL = ModelKind("causal", "AutoModelForCausalLM")
MASKED = ModelKind("masked", "AutoModelForMaskedLM")
ENCODER = ModelKind("encoder", "AutoModel")


def kind_of(config: Any, *, given: str) -> ModelKind:
    """Tell causal, masked and headless language models apart.

    The class that the checkpoint names (``architectures``) decides. One that names none, or a class from
    elsewhere, is told by its configuration's class: causal where transformers knows a causal model for it and
    it is no bidirectional encoder, else masked. ``encoder`` is a text model without an output head.

    Raises:
        SourceError: the checkpoint is of another class (a classifier, a speech or vision model); the class is
            named.
    """
    auto = require("transformers.models.auto.modeling_auto", feature="Loading a model")
    named = (getattr(config, "architectures", None) or [None])[0]
    if named is not None:
        if named in _names(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES):
            return MASKED
        if named in _names(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            return CAUSAL
        if named in _names(auto.MODEL_MAPPING_NAMES) and _reads_text_only(config):
            return ENCODER
    by_code = getattr(config, "auto_map", None) or {}
    for kind in (CAUSAL, MASKED):
        if kind.auto_class in by_code:
            return kind
    known_class = named is not None and hasattr(require("transformers", feature="Loading a model"), named)
    if not known_class:
        masked = type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING
        if type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING and not (
            masked and not getattr(config, "is_decoder", False)
        ):
            return CAUSAL
        if masked:
            return MASKED
    raise SourceError(
        f"{given!r} is no language model that mainstem can load: it is a {named or type(config).__name__}. "
        "Give a causal or masked language model (...ForCausalLM, ...ForMaskedLM) or a text encoder."
    )


def _names(mapping: Any) -> set[str]:
    """All class names of one of transformers' tables, whose values are a name or a tuple of names."""
    found: set[str] = set()
    for value in mapping.values():
        found |= set(value) if isinstance(value, (tuple, list)) else {value}
    return found


def _reads_text_only(config: Any) -> bool:
    return getattr(config, "vocab_size", None) is not None and not getattr(
        config, "is_encoder_decoder", False
    )
