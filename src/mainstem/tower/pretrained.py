"""Weights of other people's models in a tower, and back.

Llama, Mistral, Qwen 2 and 3, GPT-2, OLMo 2, Gemma 2 and 3 (text), from a live ``transformers`` model or from
a checkpoint folder of ``config.json`` and safetensors. Nothing is ever unpickled, and no field of a config is
ignored: what a tower cannot express is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from mainstem.errors import ConfigError, MissingExtraError, SourceError
from mainstem.tower._config import TowerConfig
from mainstem.tower._families import Weight, family_names, translate_config, weight_table
from mainstem.tower._model import Tower

__all__ = [
    "family_names",
    "tower_config_from_transformers",
    "tower_from_checkpoint",
    "tower_from_state_dict",
    "tower_from_transformers",
    "tower_to_transformers",
]


class TransformersConfig(Protocol):
    """What is asked of a ``transformers`` config."""

    @property
    def model_type(self) -> str:
        """The family's name."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return every field with its value."""
        ...


class TransformersModel(Protocol):
    """What is asked of a ``transformers`` model."""

    config: Any

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the weights by name."""
        ...


def tower_config_from_transformers(config: TransformersConfig) -> TowerConfig:
    """Translate a ``transformers`` config.

    Raises:
        ConfigError: the family is not known, or a field is set that a tower does not have.
    """
    return translate_config(config.to_dict())


def tower_from_transformers(model: TransformersModel) -> Tower:
    """Return a tower that computes what a live ``transformers`` causal language model computes.

    Args:
        model: a ``...ForCausalLM`` of one of :func:`family_names`.

    Returns:
        A tower in eval mode with copies of the weights, in their dtype.

    Raises:
        ConfigError: the family or a field of its config is not supported.
        SourceError: a weight is missing, left over, or of another shape.
    """
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return tower_from_state_dict(model.config, weights)


def tower_from_checkpoint(folder: str | Path) -> Tower:
    """Return a tower with the weights of a folder that ``save_pretrained`` wrote.

    Args:
        folder: holds ``config.json`` and ``model.safetensors`` or its shards.

    Raises:
        MissingExtraError: transformers, which knows each family's default values, is not installed.
        SourceError: a file is missing, or a weight is.
        ConfigError: the family or a field of its config is not supported.
    """
    folder = Path(folder)
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingExtraError("Reading a checkpoint's config", "transformers", "hf") from error
    if not (folder / "config.json").is_file():
        raise SourceError(f"{folder} has no config.json; give a folder that save_pretrained wrote.")
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return tower_from_state_dict(config, _read_safetensors(folder))


def tower_from_state_dict(config: TransformersConfig, weights: Mapping[str, Tensor]) -> Tower:
    """Return a tower that owns ``weights``, which are named as ``transformers`` names them.

    Tensors that need no change of layout are used as they are, without a copy.

    Raises:
        ConfigError: the family or a field of its config is not supported.
        SourceError: a weight is missing, left over, or of another shape.
    """
    tower_config = tower_config_from_transformers(config)
    with torch.device("meta"):
        tower = Tower(tower_config)
    shapes = {name: tensor.shape for name, tensor in tower.state_dict().items()}
    left = {name for name in weights if not _is_buffer(name)}
    loaded: dict[str, Tensor] = {}
    for weight in weight_table(config.model_type, tower_config):
        if weight.theirs == "lm_head.weight" and tower_config.tied:
            left.discard(weight.theirs)
            continue
        if weight.theirs not in left:
            raise SourceError(
                f"the weights have no {weight.theirs!r}, which a {config.model_type} must have."
            )
        left.discard(weight.theirs)
        loaded |= _split(weight, weights[weight.theirs], shapes)
    if left:
        raise SourceError(
            f"the weights hold {len(left)} tensors that a {config.model_type} tower has no place for, "
            f"such as {sorted(left)[0]!r}."
        )
    if tower_config.tied:
        loaded["head.weight"] = loaded["token_embedding.weight"]
    tower.load_state_dict(loaded, assign=True)
    tower.tie_weights()
    return tower.eval()


def tower_to_transformers(tower: Tower, config: TransformersConfig) -> dict[str, Tensor]:
    """Return the tower's weights under the names of a plain ``transformers`` model with ``config``.

    ``model.load_state_dict`` of that model takes them; from a tower loaded with the same config they are the
    original weights to the bit.

    Raises:
        ConfigError: ``config`` describes another function than the tower's.
    """
    expected = tower_config_from_transformers(config)
    if expected != tower.config:
        theirs, ours = expected.to_dict(), tower.config.to_dict()
        different = sorted(name for name in ours if ours[name] != theirs[name])
        raise ConfigError(
            f"this {config.model_type} config is not the tower's: they differ in {', '.join(different)}."
        )
    state = tower.state_dict()
    weights: dict[str, Tensor] = {}
    for weight in weight_table(config.model_type, expected):
        joined = torch.cat([state[name].detach() for name in weight.ours])
        weights[weight.theirs] = joined.T.contiguous() if weight.transposed else joined
    return weights


def _split(weight: Weight, tensor: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    tensor = tensor.T if weight.transposed else tensor
    sizes = [shapes[name][0] for name in weight.ours]
    expected = (sum(sizes), *shapes[weight.ours[0]][1:])
    if tensor.shape != expected:
        raise SourceError(
            f"weight {weight.theirs!r} has shape {tuple(tensor.shape)}; the config asks for {expected}."
        )
    parts = tensor.split(sizes)
    return dict(zip(weight.ours, (part.contiguous() for part in parts), strict=True))


def _is_buffer(name: str) -> bool:
    # Older checkpoints carry buffers: GPT-2's causal mask, rotary frequencies.
    return name.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"))


def _read_safetensors(folder: Path) -> dict[str, Tensor]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif single.is_file():
        shards = [single.name]
    else:
        raise SourceError(
            f"{folder} has no model.safetensors; pickled weights are not read, convert them first."
        )
    weights: dict[str, Tensor] = {}
    for shard in shards:
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise SourceError(f"{index.name} names the shard {shard!r}, which is not a file of {folder}.")
        with safe_open(folder / shard, framework="pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    return weights
