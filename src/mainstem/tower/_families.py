"""How other people's configs and weight names translate to a tower's.

Every field of a config is either translated, or known to have no effect on the function, or refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mainstem.connections import NormConfig
from mainstem.errors import ConfigError
from mainstem.tower._config import Activation, RopeConfig, TowerConfig

Fields = Mapping[str, Any]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# Fields that change nothing in the function from tokens to logits.
_INERT = frozenset(
    {
        "_attn_implementation",
        "_model_name_or_path",
        "_name_or_path",
        "_sliding_window_pattern",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "sliding_window_pattern",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
    }
)

# Fields that are fine at this value and not understood at any other.
_ONLY: dict[str, Any] = {
    "is_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "add_cross_attention": False,
    "use_bidirectional_attention": (False, None),
    "rope_interleaved": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    # fp32 softmax in half precision; the same function
    "reorder_and_upcast_attn": (False, True),
    "partial_rotary_factor": (1.0, None),
    "per_layer_config": None,
    "tie_last_hidden_states": (None, True, False),
}


class _Reader:
    """Hands out a config's fields and remembers which were asked for."""

    def __init__(self, fields: Fields):
        self._fields = fields
        self._family = str(fields.get("model_type"))
        self._left = set(fields) - _INERT

    def take(self, name: str, default: Any = dataclasses.MISSING) -> Any:
        self._left.discard(name)
        if name in self._fields:
            return self._fields[name]
        if default is dataclasses.MISSING:
            raise ConfigError(f"the {self._family} config has no field {name!r}, which its tower needs.")
        return default

    def activation(self, name: str) -> Activation:
        given = self.take(name)
        if given not in _ACTIVATIONS:
            raise ConfigError(
                f"{name}={given!r} of the {self._family} config is not supported; "
                f"known: {', '.join(_ACTIVATIONS)}."
            )
        return _ACTIVATIONS[given]

    def finish(self) -> None:
        """Refuse whatever was neither asked for nor known to be without effect."""
        for name in sorted(self._left):
            value = self._fields[name]
            only = _ONLY.get(name, (None, False))
            if value not in (only if isinstance(only, tuple) else (only,)):
                raise ConfigError(
                    f"{name}={value!r} of the {self._family} config is not supported by a tower; "
                    "load this model with transformers instead."
                )


def _rope(parameters: Any) -> RopeConfig:
    if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
        raise ConfigError(
            f"rope parameters {parameters!r} are not understood; expected a dict with rope_theta."
        )
    given = dict(parameters)
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if given.pop("partial_rotary_factor", 1.0) not in (1.0, None):
        raise ConfigError("rope with partial_rotary_factor other than 1 is not supported by a tower.")
    names = {
        "default": {"rope_theta": "theta"},
        "linear": {"rope_theta": "theta", "factor": "factor"},
        "llama3": {
            "rope_theta": "theta",
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_positions",
        },
    }
    if kind not in names:
        raise ConfigError(f"rope type {kind!r} is not supported; known: {', '.join(names)}.")
    if unknown := sorted(set(given) - set(names[kind])):
        raise ConfigError(f"rope type {kind!r} has no parameter {', '.join(unknown)} that a tower knows.")
    values = {ours: given[theirs] for theirs, ours in names[kind].items() if theirs in given}
    return RopeConfig(scaling="none" if kind == "default" else kind, **values)


def _decoder(read: _Reader) -> dict[str, Any]:
    """What every family but GPT-2 writes alike."""
    width, num_heads = read.take("hidden_size"), read.take("num_attention_heads")
    norm = NormConfig(kind="rms", eps=read.take("rms_norm_eps"))
    return {
        "vocab_size": read.take("vocab_size"),
        "width": width,
        "num_blocks": read.take("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": read.take("num_key_value_heads", None) or num_heads,
        "head_dim": read.take("head_dim", None) or width // num_heads,
        "ffn_width": read.take("intermediate_size"),
        "norm": norm,
        "max_positions": read.take("max_position_embeddings"),
        "tied": bool(read.take("tie_word_embeddings")),
        "attn_dropout": float(read.take("attention_dropout", 0.0) or 0.0),
    }


def _windows(read: _Reader, num_blocks: int) -> dict[str, Any]:
    """Blocks by ``layer_types``; a window that no block uses is dropped, as transformers ignores it."""
    window = read.take("sliding_window", None)
    names = {"full_attention": "full", "sliding_attention": "sliding"}
    given = read.take("layer_types", None) or ["full_attention"] * num_blocks
    if unknown := sorted(set(given) - set(names)):
        raise ConfigError(f"layer type {unknown[0]!r} is not supported; known: {', '.join(names)}.")
    block_types = tuple(names[name] for name in given)
    return {"block_types": block_types, "sliding_window": window if "sliding" in block_types else None}


def _llama(read: _Reader) -> TowerConfig:
    bias = bool(read.take("attention_bias", False))
    return TowerConfig(
        **_decoder(read),
        rope=_rope(read.take("rope_parameters")),
        activation=read.activation("hidden_act"),
        qkv_bias=bias,
        attn_out_bias=bias,
        ffn_bias=bool(read.take("mlp_bias", False)),
    )


def _mistral(read: _Reader) -> TowerConfig:
    # Every block slides; transformers' Mistral ignores layer_types, so they are refused here.
    return TowerConfig(
        **_decoder(read),
        rope=_rope(read.take("rope_parameters")),
        activation=read.activation("hidden_act"),
        sliding_window=read.take("sliding_window"),
    )


def _qwen2(read: _Reader) -> TowerConfig:
    common = _decoder(read)
    return TowerConfig(
        **common,
        **_windows(read, common["num_blocks"]),
        rope=_rope(read.take("rope_parameters")),
        activation=read.activation("hidden_act"),
        qkv_bias=True,
    )


def _qwen3(read: _Reader) -> TowerConfig:
    common, bias = _decoder(read), bool(read.take("attention_bias"))
    return TowerConfig(
        **common,
        **_windows(read, common["num_blocks"]),
        rope=_rope(read.take("rope_parameters")),
        activation=read.activation("hidden_act"),
        qkv_bias=bias,
        attn_out_bias=bias,
        qk_norm="head",
    )


def _olmo2(read: _Reader) -> TowerConfig:
    bias = bool(read.take("attention_bias"))
    return TowerConfig(
        **_decoder(read),
        rope=_rope(read.take("rope_parameters")),
        connection="reordered_norm",
        activation=read.activation("hidden_act"),
        qkv_bias=bias,
        attn_out_bias=bias,
        qk_norm="full",
    )


def _gemma(read: _Reader) -> dict[str, Any]:
    common, bias = _decoder(read), bool(read.take("attention_bias"))
    return common | {
        **_windows(read, common["num_blocks"]),
        "connection": "sandwich_norm",
        "norm": dataclasses.replace(common["norm"], unit_offset=True),
        "activation": read.activation("hidden_activation"),
        "qkv_bias": bias,
        "attn_out_bias": bias,
        "attn_scale": read.take("query_pre_attn_scalar") ** -0.5,
        "embed_scale": common["width"] ** 0.5,
        "final_softcap": read.take("final_logit_softcapping"),
    }


def _gemma2(read: _Reader) -> TowerConfig:
    return TowerConfig(
        **_gemma(read),
        rope=_rope(read.take("rope_parameters")),
        attn_softcap=read.take("attn_logit_softcapping"),
    )


def _gemma3(read: _Reader) -> TowerConfig:
    # attn_logit_softcapping is a field of Gemma 3 that transformers reads and does not apply; it is refused.
    fields, rope = _gemma(read), read.take("rope_parameters")
    sliding = "sliding" in fields["block_types"]
    return TowerConfig(
        **fields,
        rope=_rope(rope["full_attention"]),
        local_rope=_rope(rope["sliding_attention"]) if sliding else None,
        qk_norm="head",
    )


def _gpt2(read: _Reader) -> TowerConfig:
    width, dropout = read.take("n_embd"), read.take("resid_pdrop")
    if read.take("embd_pdrop") != dropout:
        raise ConfigError(
            "GPT-2 with embd_pdrop different from resid_pdrop is not supported; set both alike."
        )
    return TowerConfig(
        vocab_size=read.take("vocab_size"),
        width=width,
        num_blocks=read.take("n_layer"),
        num_heads=read.take("n_head"),
        ffn_width=read.take("n_inner", None) or 4 * width,
        norm=NormConfig(kind="layer", eps=read.take("layer_norm_epsilon")),
        positions="learned",
        max_positions=read.take("n_positions"),
        qkv_bias=True,
        attn_out_bias=True,
        ffn_bias=True,
        gated=False,
        activation=read.activation("activation_function"),
        tied=bool(read.take("tie_word_embeddings", True)),
        dropout=dropout,
        attn_dropout=read.take("attn_pdrop"),
    )


_TRANSLATE: dict[str, Callable[[_Reader], TowerConfig]] = {
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "olmo2": _olmo2,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def family_names() -> list[str]:
    """Return the ``model_type`` values whose weights a tower can hold."""
    return sorted(_TRANSLATE)


def translate_config(fields: Fields) -> TowerConfig:
    """Return the tower's config for the fields of a ``transformers`` config (``config.to_dict()``).

    Raises:
        ConfigError: the family is not known, or a field is set that a tower does not have.
    """
    family = fields.get("model_type")
    if family not in _TRANSLATE:
        raise ConfigError(
            f"a tower cannot hold a model of type {family!r}; known: {', '.join(family_names())}."
        )
    quantization = fields.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "gguf":
        # The mark that a model read from a .gguf file keeps; its weights are dense by then.
        fields = {name: value for name, value in fields.items() if name != "quantization_config"}
    read = _Reader(fields)
    config = _TRANSLATE[family](read)
    read.finish()
    return config


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of theirs and the tensors of ours that it holds, stacked along the output dimension."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


def weight_table(family: str, config: TowerConfig) -> list[Weight]:
    """Return the pairs of names, in both directions: each tensor of a tower's state dict appears once."""
    pairs = _gpt2_names(config) if family == "gpt2" else _decoder_names(family, config)
    ours = {
        "token_embedding.weight": "transformer.wte.weight"
        if family == "gpt2"
        else "model.embed_tokens.weight",
        "trunk.final_norm.weight": "transformer.ln_f.weight" if family == "gpt2" else "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if family == "gpt2":
        ours |= {
            "trunk.final_norm.bias": "transformer.ln_f.bias",
            "position_embedding.weight": "transformer.wpe.weight",
        }
    return [Weight(theirs, (mine,)) for mine, theirs in ours.items()] + pairs


def _decoder_names(family: str, config: TowerConfig) -> list[Weight]:
    norms = {
        "olmo2": {
            "connections.0.norm": "post_attention_layernorm",
            "connections.1.norm": "post_feedforward_layernorm",
        },
        "sandwich": {
            "connections.0.norm": "input_layernorm",
            "connections.0.write_norm": "post_attention_layernorm",
            "connections.1.norm": "pre_feedforward_layernorm",
            "connections.1.write_norm": "post_feedforward_layernorm",
        },
        "pre": {"connections.0.norm": "input_layernorm", "connections.1.norm": "post_attention_layernorm"},
    }["olmo2" if family == "olmo2" else "sandwich" if family.startswith("gemma") else "pre"]
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in norms.items()}
    biased = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.attn_out_bias}
    for letter, bias in biased.items():
        ours = f"attn.{'out' if letter == 'o' else letter}_proj"
        for part in ("weight", "bias") if bias else ("weight",):
            names[f"{ours}.{part}"] = f"self_attn.{letter}_proj.{part}"
    if config.qk_norm != "none":
        names |= {f"attn.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
    for name in ("gate_proj", "up_proj", "down_proj"):
        for part in ("weight", "bias") if config.ffn_bias else ("weight",):
            names[f"mlp.{name}.{part}"] = f"mlp.{name}.{part}"
    return [
        Weight(f"model.layers.{i}.{theirs}", (f"blocks.{i}.{ours}",))
        for i in range(config.num_blocks)
        for ours, theirs in names.items()
    ]


def _gpt2_names(config: TowerConfig) -> list[Weight]:
    """GPT-2's ``Conv1D`` keeps ``[in, out]`` matrices, and query, key and value in one of them."""
    pairs: list[Weight] = []
    for i in range(config.num_blocks):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for part in ("weight", "bias"):
            conv = part == "weight"
            qkv = tuple(f"{ours}.attn.{x}_proj.{part}" for x in "qkv")
            pairs += [
                Weight(f"{theirs}.ln_1.{part}", (f"{ours}.connections.0.norm.{part}",)),
                Weight(f"{theirs}.ln_2.{part}", (f"{ours}.connections.1.norm.{part}",)),
                Weight(f"{theirs}.attn.c_attn.{part}", qkv, transposed=conv),
                Weight(f"{theirs}.attn.c_proj.{part}", (f"{ours}.attn.out_proj.{part}",), transposed=conv),
                Weight(f"{theirs}.mlp.c_fc.{part}", (f"{ours}.mlp.up_proj.{part}",), transposed=conv),
                Weight(f"{theirs}.mlp.c_proj.{part}", (f"{ours}.mlp.down_proj.{part}",), transposed=conv),
            ]
    return pairs
