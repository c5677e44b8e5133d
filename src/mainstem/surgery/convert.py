"""A pretrained model with another residual connection: the same function first, then trained on.

The weights of the branches, the embedding, the head and the norms are carried over; what the new connection
owns besides starts where the stack computes what it computed (``exact_start``). Whether it does is not
believed but measured, on a text, before anything is saved.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mainstem.connections import SCHEMES, DepthScaledConnection, make_scheme
from mainstem.errors import ConfigError, MainstemError
from mainstem.sources import load_model, load_text, make_windows, quiet_transformers, require, versions
from mainstem.surgery._folder import check_out, new_folder
from mainstem.surgery.convert_layout import LAYOUTS, convert_layout
from mainstem.surgery.convert_proof import Distance, measure_distance
from mainstem.tower import Tower

SCHEMA = "mainstem.convert/1"
"""Of ``convert.json``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """What to convert, into what, and on which text to prove it.

    Attributes:
        model: as `mainstem.sources.load_model` takes it; a saved tower too.
        connection: a name from `mainstem.connections.scheme_names`, or None to keep a tower's own.
        options: the scheme's options; ``exact_start`` is set where the scheme offers it and none is given.
        layout: one of `mainstem.surgery.convert_layout.LAYOUTS`, in which an mHC is saved, or None.
        stream_dtype: least dtype of the stream, ``"float32"``, or None to follow the branches.
        text: as `mainstem.sources.load_text` takes it.
        tokens, window, batch_size, first_token: as `mainstem.sources.make_windows` takes them.
        dtype: of the weights.
        revision, trust_remote_code: of a hub model.
        tolerance: the largest logit difference at which the function counts as kept.
        allow_change: save also where it is not kept.
    """

    model: str
    text: str
    connection: str | None = None
    layout: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    stream_dtype: str | None = "float32"
    tokens: int | None = 1024
    window: int = 256
    batch_size: int = 2
    first_token: str = "none"
    dtype: str = "float32"
    revision: str | None = None
    trust_remote_code: bool = False
    tolerance: float = 1e-3
    allow_change: bool = False

    def __post_init__(self) -> None:
        if self.stream_dtype not in (None, "float32"):
            raise ConfigError(f"stream dtype {self.stream_dtype!r} is not served; choose float32 or auto.")
        if not self.tolerance >= 0:
            raise ConfigError(f"the tolerance {self.tolerance} must be a logit difference of 0 or more.")
        if self.connection is not None:
            make_scheme(self.connection, **self.options)
        elif self.layout is None:
            raise ConfigError("nothing to convert to: give --connection NAME, or --layout NAME for an mHC.")
        elif self.options:
            raise ConfigError("--set is for the options of --connection, which is not given; leave it out.")
        if self.layout not in (None, *LAYOUTS):
            raise ConfigError(f"no layout is called {self.layout!r}; choose one of: {', '.join(LAYOUTS)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """A converted model, not yet saved.

    Attributes:
        model: the tower as a ``transformers`` model, in eval mode.
        tokenizer: the source's, or None.
        generation_config: the source's, or None.
        record: what ``convert.json`` will say.
        distance: from the source, on the text.
        kept: whether the largest logit difference is within the tolerance.
    """

    model: Any
    tokenizer: Any
    generation_config: Any
    record: dict[str, Any]
    distance: Distance
    kept: bool


def start_options(connection: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with ``exact_start=True`` where the scheme offers it and nothing else was said."""
    # make_scheme first: it knows other packages' schemes and refuses what it does not know.
    scheme = make_scheme(connection, **options)
    offered = SCHEMES[scheme.name].no_exact_start is None
    return {"exact_start": True, **options} if offered else dict(options)


@torch.no_grad()
def convert_tower(
    source: Tower,
    connection: str,
    options: Mapping[str, Any] | None = None,
    *,
    stream_dtype: str | None = "float32",
) -> tuple[Tower, dict[str, list[str]]]:
    """Return a tower with ``source``'s weights and another connection, and which tensors are new or left out.

    A norm's weight and bias are multiplied by the gain that the new scheme starts it at, which is 1 but in
    LayerNorm Scaling (``sqrt(b)``, which it divides out again) and in gated streams, whose norms stand
    inside their gates. Matrices that make updates are divided by a depth-scaled connection's constant.

    Args:
        source: any tower; not changed, and no tensor is shared with it.
        connection: a scheme's name.
        options: the scheme's; see :func:`start_options`.
        stream_dtype: ``"float32"`` or None.

    Returns:
        The tower in eval mode, in the source's dtype, all its parameters trainable; and
        ``{"new": names, "left_out": names}`` of its and of the source's state.

    Raises:
        ConfigError: the scheme or an option is not known, or cannot be joined with a part of the tower.
    """
    config = dataclasses.replace(
        source.config,
        connection=connection,
        connection_options=start_options(connection, options or {}),
        stream_dtype=stream_dtype,  # pyright: ignore[reportArgumentType]
    )
    tower = Tower(config).to(source.token_embedding.weight.dtype)
    old, started = source.state_dict(), tower.state_dict()
    loaded: dict[str, Tensor] = {}
    for name, start in started.items():
        found = _taken_from(name, old)
        if found is not None:
            loaded[name] = _carried(name, old[found], start, started, config.norm.unit_offset)
    tower.load_state_dict({**started, **loaded})
    _divide_writes(tower)
    tower.tie_weights()
    used = {_taken_from(name, old) for name in loaded}
    changes = {
        "new": [name for name in started if name not in loaded],
        "left_out": [name for name in old if name not in used],
    }
    return tower.eval(), changes


def _taken_from(name: str, old: Mapping[str, Tensor]) -> str | None:
    """Return the name of the source's tensor that belongs at ``name``, if there is one."""
    if name in old:
        return name
    at, gate, _ = name.rpartition("gate.gain")
    norm = f"{at}final_norm.weight" if at == "trunk." else f"{at}norm.weight"
    return norm if gate and norm in old else None


def _carried(
    name: str, value: Tensor, start: Tensor, started: Mapping[str, Tensor], unit_offset: bool
) -> Tensor:
    """Return the source's tensor as the new scheme needs it."""
    if name.endswith("gate.gain"):
        # A gate's gain is stored as it is, Gemma's norm as what it has beyond 1.
        gain = value.to(start.dtype) + (1.0 if unit_offset else 0.0)
        return start * gain.repeat(len(start) // len(value))
    owner, _, kind = name.rpartition(".")
    if not owner.endswith("norm") or unit_offset or f"{owner}.weight" not in started:
        return value
    gain = started[f"{owner}.weight"] if kind == "bias" else start
    return value.to(start.dtype) * gain


def _divide_writes(tower: Tower) -> None:
    """Divide what makes each update by the constant that a depth-scaled connection multiplies it by.

    That is the value the scheme itself names as the way to keep a function (CompleteP, arXiv 2505.01618).
    """
    for _, connection, branches in tower.sublayers():
        if not isinstance(connection, DepthScaledConnection):
            continue
        for branch in branches.values():
            last = getattr(branch, "out_proj" if hasattr(branch, "out_proj") else "down_proj")
            for parameter in last.parameters():
                parameter.div_(connection.write_scale.to(parameter.dtype))


def convert(config: ConvertConfig) -> Conversion:
    """Load a model, convert it, and measure on the text how far its predictions moved.

    Raises:
        MainstemError: the function is not kept and ``allow_change`` is not set; the distance is named.
        ConfigError: the family cannot be held in a tower, or the scheme cannot be joined with it.
        SourceError: the model or the text cannot be had.
        MissingExtraError: transformers is not installed.
    """
    require("transformers", feature="Converting a model")
    from mainstem.tower.hf import MainstemForCausalLM
    from mainstem.tower.pretrained import tower_from_transformers

    loaded = load_model(
        config.model,
        dtype=config.dtype,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    is_tower = isinstance(loaded.model, MainstemForCausalLM)
    source = loaded.model.tower if is_tower else tower_from_transformers(loaded.model)
    tower, changes = _converted(source, config)
    del source
    model = MainstemForCausalLM.from_tower(tower)
    windows = make_windows(
        loaded.tokenizer,
        load_text(config.text),
        num_tokens=config.tokens,
        window=config.window,
        batch_size=config.batch_size,
        first_token=config.first_token,
    )
    distance = measure_distance(loaded.model, model, windows)
    # A difference that is nan is not within anything.
    kept = distance.max_logit_difference <= config.tolerance and math.isfinite(distance.loss_after)
    if not (kept or config.allow_change):
        raise MainstemError(_refusal(config, tower.config.connection, distance))
    record = {
        "schema": SCHEMA,
        "source": loaded.provenance,
        "text": windows.provenance,
        "connection": tower.config.connection,
        "layout": config.layout,
        "options": tower.config.to_dict()["connection_options"],
        "stream_dtype": tower.config.stream_dtype,
        "tolerance": config.tolerance,
        "kept": kept,
        "distance": distance.to_dict(),
        "parameters_new": sum(p.numel() for name, p in tower.named_parameters() if name in changes["new"]),
        **changes,
        "versions": versions("mainstem", "torch", "transformers"),
    }
    return Conversion(
        model=model,
        tokenizer=loaded.tokenizer,
        generation_config=getattr(loaded.model, "generation_config", None),
        record=record,
        distance=distance,
        kept=kept,
    )


def _converted(source: Tower, config: ConvertConfig) -> tuple[Tower, dict[str, list[str]]]:
    if config.connection is None:
        assert config.layout is not None
        return convert_layout(source, config.layout)
    tower, changes = convert_tower(
        source, config.connection, config.options, stream_dtype=config.stream_dtype
    )
    if config.layout is None:
        return tower, changes
    laid_out, moved = convert_layout(tower, config.layout)
    return laid_out, {name: [*changes[name], *moved[name]] for name in changes}


def _refusal(config: ConvertConfig, connection: str, distance: Distance) -> str:
    why = SCHEMES[connection].no_exact_start
    because = f": {why[:-1]}" if why else ""
    layout = f" in the layout {config.layout}" if config.layout else ""
    return (
        f"{connection}{layout} does not keep what {config.model} computes{because}; logits move by up to "
        f"{distance.max_logit_difference:.3g} (at most {config.tolerance:g} is kept), mean KL "
        f"{distance.mean_kl:.3g} nats, loss {distance.loss_before:.3f} -> {distance.loss_after:.3f}; "
        "nothing was saved, --allow-change saves it."
    )


def save_conversion(conversion: Conversion, out: Path) -> Path:
    """Write model, tokenizer, generation config and ``convert.json`` into the new folder ``out``.

    All is written beside its place first and moved there as one, so ``out`` is whole or not there.

    Raises:
        MainstemError: ``out`` is there already, or cannot be written.
    """
    check_out(out, str(conversion.record["source"].get("resolved", "")))
    with new_folder(out) as folder, quiet_transformers():
        if conversion.generation_config is not None:
            conversion.model.generation_config = conversion.generation_config
        conversion.model.save_pretrained(folder)
        if conversion.tokenizer is not None:
            conversion.tokenizer.save_pretrained(folder)
        text = json.dumps(conversion.record, indent=1, ensure_ascii=False) + "\n"
        (folder / "convert.json").write_text(text, "utf-8")
    return out
