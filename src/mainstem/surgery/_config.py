"""A configuration without some of its blocks: the number of blocks, and everything that is said of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from mainstem.errors import ConfigError

# Lists of numbers of blocks: the numbers change with the blocks.
_INDEX_LISTS = re.compile(
    r"(only_layers|_layer_ids|_layers_idx|_layer_idx|_idxs|_indices|layers_indices|^moe_layers|"
    r"^dense_layers|^cross_attention_layers)$"
)
# "The first n blocks are ...": of these, those that are kept. "The last n" likewise.
_DECODER = "decoder_layers"  # of a decoder without its encoder, whose num_hidden_layers means the encoder
_FIRST = ("first_k_dense_replace", "max_window_layers", "num_dense_layers", "moe_layer_start_index")
_LAST = ("num_kv_shared_layers",)
# Lists that may be as long as the model is deep by chance.
_NEVER = re.compile(r"(token_ids?$|_tokens$|^architectures$|^keys_to|^labels?|_names$|^id2label$)")


def depth_of(config: Any) -> int:
    """Return the number of blocks that a model's configuration states for its (text) decoder.

    Raises:
        ConfigError: an encoder-decoder, or no number of blocks.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(config).__name__} describes an encoder and a decoder, which share no list of blocks; "
            "give a model that has one stack."
        )
    text = config.get_text_config()
    depth = getattr(text, _DECODER, None) or getattr(text, "num_hidden_layers", None)
    if not isinstance(depth, int):
        raise ConfigError(
            f"{type(config).__name__} states no num_hidden_layers; give a model whose configuration "
            "says how many blocks it has."
        )
    return depth


def cut_config(config: Any, removed: Sequence[int]) -> Any:
    """Return a new configuration without the blocks ``removed`` (0-based).

    Cut are: the number of blocks under the configuration's own name; every list with an entry a block; lists
    and tables by the numbers of blocks (``mlp_only_layers``, ``per_layer_config``), which are renumbered; and
    the counts of first or last blocks (``first_k_dense_replace``, ``max_window_layers``, ...). A period of
    mixture-of-experts blocks (``decoder_sparse_step``) is written out as ``mlp_only_layers``, and
    ``attention_types`` block by block. Other periods are not expressible; whether they matter is for the
    caller to prove.
    """
    settings: dict[str, Any] = config.to_dict()
    text = config.get_text_config()
    inner = next((key for key in config.sub_configs if getattr(config, key, None) is text), None)
    fields = settings if inner is None else settings[inner]
    depth = depth_of(config)
    gone = set(removed)
    kept = [block for block in range(depth) if block not in gone]
    number = {block: place for place, block in enumerate(kept)}
    changes = dict(_cut_fields(fields, kept, number, depth))
    fields.update(changes)
    for name in _counts(text):
        if fields.get(name) == depth:
            fields[name] = len(kept)
    if _is_dense_gguf(settings.get("quantization_config")):
        del settings["quantization_config"]  # it says how the file was packed; the weights here are dense
    return type(config).from_dict(settings)


def _counts(text: Any) -> tuple[str, ...]:
    """Return the names under which the number of blocks may be kept."""
    if hasattr(text, _DECODER):
        return (_DECODER,)
    return (text.attribute_map.get("num_hidden_layers", "num_hidden_layers"), "num_blocks")


def _cut_fields(
    fields: Mapping[str, Any], kept: list[int], number: Mapping[int, int], depth: int
) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, (list, tuple)):
            entries = cast(Sequence[Any], value)
            if (shorter := _cut_list(name, entries, kept, number, depth)) is not None:
                yield name, type(value)(shorter)
        elif isinstance(value, dict) and "layer" in name:
            settings = cast(dict[Any, Any], value)
            if settings and all(str(key).isdigit() and int(key) < depth for key in settings):
                yield (
                    name,
                    {
                        type(key)(number[int(key)]): said
                        for key, said in settings.items()
                        if int(key) in number
                    },
                )
        elif isinstance(value, int) and not isinstance(value, bool):
            if name in _FIRST:
                yield name, value - sum(block < value for block in range(depth) if block not in number)
            elif name in _LAST:
                yield name, sum(block >= depth - value for block in kept)
    yield from _written_out(fields, kept, number)


def _cut_list(
    name: str, entries: Sequence[Any], kept: list[int], number: Mapping[int, int], depth: int
) -> list[Any] | None:
    """Return the entries that stay; None where the list says nothing of blocks."""
    if _INDEX_LISTS.search(name):
        if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
            return None
        return [number[entry] for entry in entries if entry in number]
    if _NEVER.search(name):
        return None
    beyond = len(entries) > depth and "layer" in name.lower()
    if len(entries) != depth and not beyond:
        return None
    return [entries[block] for block in kept] + list(entries[depth:])


def _written_out(
    fields: Mapping[str, Any], kept: list[int], number: Mapping[int, int]
) -> Iterator[tuple[str, Any]]:
    """Periods that can be said block by block."""
    step = fields.get("decoder_sparse_step")
    if isinstance(step, int) and step > 1 and "mlp_only_layers" in fields:
        dense = set(fields["mlp_only_layers"] or []) | {b for b in kept if (b + 1) % step}
        yield "mlp_only_layers", [number[block] for block in kept if block in dense]
        yield "decoder_sparse_step", 1
    kinds = fields.get("attention_layers")
    if "attention_types" in fields and isinstance(kinds, list):
        entries = cast(list[str], kinds)
        yield "attention_types", [[[entries[block]], 1] for block in kept]


def _is_dense_gguf(settings: Any) -> bool:
    if settings is None:
        return False
    said: Any = settings if isinstance(settings, dict) else vars(settings)
    return str(said.get("quant_method", "")).lower().endswith("gguf")
