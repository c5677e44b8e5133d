"""What a tower is made of, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from mainstem.connections import NormConfig, Scheme, make_scheme
from mainstem.errors import ConfigError

BlockType = Literal["full", "sliding"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ValueResidual = Literal["none", "fixed", "learned", "shared"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864, eq. 15) and how their wavelengths are stretched.

    Attributes:
        theta: base of the geometric row of wavelengths.
        scaling: ``"none"``; ``"linear"`` divides every frequency by ``factor`` (Chen et al. 2023, arXiv
            2306.15595, eq. 4); ``"llama3"`` divides the low ones only and interpolates between
            ``low_freq_factor`` and ``high_freq_factor`` (Llama 3.1's reference code).
        factor: how much longer the context becomes.
        low_freq_factor: wavelengths above ``original_max_positions / low_freq_factor`` are stretched in full.
        high_freq_factor: wavelengths below ``original_max_positions / high_freq_factor`` are left alone.
        original_max_positions: context length the weights were first trained with.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if not self.theta > 0:
            raise ConfigError(f"rope theta {self.theta!r} must be greater than 0, such as 10000.0.")
        if self.scaling not in ("none", "linear", "llama3"):
            raise ConfigError(
                f"rope scaling {self.scaling!r} is not known; choose 'none', 'linear' or 'llama3'."
            )
        if not self.factor > 0:
            raise ConfigError(f"rope factor {self.factor!r} must be greater than 0.")
        if self.scaling == "none" and self.factor != 1.0:
            raise ConfigError(
                f"rope factor {self.factor} has no effect with scaling 'none'; set scaling='linear'."
            )
        if self.scaling == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor; given "
                f"{self.low_freq_factor} and {self.high_freq_factor}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """A decoder-only transformer with any connection at any depth.

    Fields whose default is 0 or empty are filled in when the config is built, so that a built config always
    holds the numbers in use.

    Attributes:
        vocab_size: tokens.
        width: size of the stream's last dimension.
        num_blocks: blocks; each has an attention and a feed-forward sublayer, or one of both when
            ``parallel``.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``; 0 means ``num_heads``.
        head_dim: size of a head; 0 means ``width // num_heads``.
        ffn_width: size inside the feed-forward; 0 means ``4 * width``, or 8/3 of it rounded up to 8 when
            gated.
        connection: a name from :func:`mainstem.connections.scheme_names`.
        connection_options: that scheme's options.
        stream_dtype: the least dtype the stream and the connections' parameters are kept in when the tower is
            cast to a lower one; None lets them follow (:class:`mainstem.connections.StreamModule`).
        recompute_connections: in training, run the connections' reads and writes again in the backward pass
            instead of keeping what they work out, a block at a time; branches run once
            (`mainstem.connections.Scheme.build`).
        norm: every norm of the tower, QK-norms included.
        positions: rotary, a learned table, or none.
        max_positions: rows of the learned table; with rotary positions a note of the trained length.
        rope: rotary positions of full-attention blocks, and of sliding ones unless ``local_rope`` is given.
        local_rope: rotary positions of sliding blocks (Gemma 3).
        qk_norm: ``"head"`` norms each head's query and key (Qwen 3), ``"full"`` all heads at once (OLMo 2).
        qkv_bias, attn_out_bias, ffn_bias, head_bias: which linear maps have a bias.
        gated: ``down(activation(gate(x)) * up(x))`` (Shazeer 2020, arXiv 2002.05202, eq. 5) instead of
            ``down(activation(up(x)))``.
        activation: exact GELU is 1.6 times faster than its tanh form on CPU.
        sliding_window: a position sees itself and ``sliding_window - 1`` before it, in sliding blocks.
        block_types: ``"full"`` or ``"sliding"`` for each block; empty means all sliding if there is a window.
        attn_softcap: ``cap * tanh(score / cap)`` on attention scores (Gemma 2); takes the unfused path.
        attn_scale: factor on the scores; 0 means ``head_dim ** -0.5``.
        embed_scale: factor on the token embedding (Gemma: ``width ** 0.5``).
        final_softcap: ``cap * tanh(logit / cap)`` on the logits.
        tied: the head uses the embedding's matrix.
        parallel: attention and feed-forward read the same stream and write together (GPT-J).
        dropout: on the embedding and on what each branch returns.
        attn_dropout: on attention weights.
        value_residual: what attention takes besides the block's own values from those of the first block,
            ``"none"``; ``"fixed"`` or ``"learned"`` weights; or ``"shared"``: the first block's alone, and no
            value matrix of its own (SVFormer). See :class:`mainstem.tower.ValueMix`.
        value_residual_weights: of the first block's values and of the block's own, at the start;
            ``(0.5, 0.5)`` as published, ``(0, 1)`` to start as a tower without.
        value_residual_start: the lowest block that takes them.
        init_std: standard deviation of every matrix at the start, before the scheme's scales.

    Raises:
        ConfigError: a number out of range, or parts that cannot go together.
    """

    vocab_size: int
    width: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    ffn_width: int = 0
    connection: str = "pre_norm"
    connection_options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    stream_dtype: Literal["float32"] | None = "float32"
    recompute_connections: bool = False
    norm: NormConfig = dataclasses.field(default_factory=NormConfig)
    positions: Literal["rope", "learned", "none"] = "rope"
    max_positions: int = 2048
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool = False
    attn_out_bias: bool = False
    ffn_bias: bool = False
    head_bias: bool = False
    gated: bool = True
    activation: Activation = "silu"
    sliding_window: int | None = None
    block_types: tuple[BlockType, ...] = ()
    attn_softcap: float | None = None
    attn_scale: float = 0.0
    embed_scale: float = 1.0
    final_softcap: float | None = None
    tied: bool = True
    parallel: bool = False
    dropout: float = 0.0
    attn_dropout: float = 0.0
    value_residual: ValueResidual = "none"
    value_residual_weights: tuple[float, float] = (0.5, 0.5)
    value_residual_start: int = 1
    init_std: float = 0.02

    def __post_init__(self) -> None:
        self._check_sizes()
        self._fill()
        self._check_choices()
        self._check_numbers()
        self._check_windows()
        self._check_value_residual()
        self.scheme()  # refuses a name or an option that is not known
        if self.parallel:
            self.check_served("parallel_block", "join parallel blocks", "Set parallel=False.")
        if self.recompute_connections:
            fix = "Set recompute_connections=False."
            self.check_served("recompute", "compute its reads and writes again", fix)

    def check_served(self, feature: str, action: str, fix: str) -> None:
        """Raise a ConfigError if the connection refuses ``feature``: it cannot ``action``, so ``fix`` it."""
        reason = self.scheme().refuses.get(feature)
        if reason is not None:
            raise ConfigError(f"connection {self.connection!r} cannot {action}: {reason} {fix}")

    def scheme(self) -> Scheme:
        """Return the connection scheme; one that counts blocks is told when they are parallel."""
        scheme = make_scheme(self.connection, **self.connection_options)
        counts_blocks = any(field.name == "sublayers_per_block" for field in dataclasses.fields(scheme))
        if counts_blocks and self.parallel and "sublayers_per_block" not in self.connection_options:
            scheme = dataclasses.replace(scheme, sublayers_per_block=1)  # pyright: ignore[reportCallIssue]
        return scheme

    @property
    def num_sublayers(self) -> int:
        """Connections in the tower: one a block when parallel, else two."""
        return self.num_blocks * (1 if self.parallel else 2)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that survives JSON; :meth:`from_dict` is its inverse."""
        data = dataclasses.asdict(self)
        return data | {
            "block_types": list(self.block_types),
            "connection_options": dict(self.connection_options),
            "value_residual_weights": list(self.value_residual_weights),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TowerConfig:
        """Build a config from :meth:`to_dict`'s result.

        Raises:
            ConfigError: a field is unknown, missing, or has a value that cannot be used.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ConfigError(f"a tower's config has no field {', '.join(unknown)}; remove it.")
        values = dict(data)
        try:
            for name, part in (("norm", NormConfig), ("rope", RopeConfig), ("local_rope", RopeConfig)):
                if isinstance(values.get(name), Mapping):
                    values[name] = part(**values[name])
            values["block_types"] = tuple(values.get("block_types", ()))
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"a tower's config could not be read: {error}.") from error

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "width", "num_blocks", "num_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 1.")
        for name in ("num_kv_heads", "head_dim", "ffn_width"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} must be at least 1, or 0 for the usual value."
                )
        if not self.head_dim and self.width % self.num_heads:
            raise ConfigError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}; "
                "give head_dim, or change one."
            )

    def _fill(self) -> None:
        ffn_width = -(-8 * self.width // 24) * 8 if self.gated else 4 * self.width
        block_type: BlockType = "full" if self.sliding_window is None else "sliding"
        filled: dict[str, Any] = {
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "head_dim": self.head_dim or self.width // self.num_heads,
            "ffn_width": self.ffn_width or ffn_width,
            "block_types": tuple(self.block_types) or (block_type,) * self.num_blocks,
            "value_residual_weights": tuple(self.value_residual_weights),
            "connection_options": {k: _as_tuples(v) for k, v in self.connection_options.items()},
        }
        filled["attn_scale"] = self.attn_scale or filled["head_dim"] ** -0.5
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    def _check_choices(self) -> None:
        choices = {
            "positions": ("rope", "learned", "none"),
            "qk_norm": ("none", "head", "full"),
            "activation": ("silu", "gelu", "gelu_tanh", "relu"),
            "value_residual": ("none", "fixed", "learned", "shared"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(known)}."
                )

    def _check_numbers(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "each key head serves the same number of query heads."
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ConfigError(
                f"head_dim {self.head_dim} is odd; rotary positions turn pairs, so make it even."
            )
        for name in ("attn_softcap", "final_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r} must be greater than 0, or None for no cap.")
        for name in ("dropout", "attn_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 0 and less than 1.")
        for name in ("attn_scale", "init_std"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be greater than 0.")

    def _check_windows(self) -> None:
        if len(self.block_types) != self.num_blocks:
            raise ConfigError(
                f"block_types has {len(self.block_types)} entries for {self.num_blocks} blocks; "
                "give one a block."
            )
        if unknown := sorted(set(self.block_types) - {"full", "sliding"}):
            raise ConfigError(f"block type {unknown[0]!r} is not known; choose 'full' or 'sliding'.")
        sliding = "sliding" in self.block_types
        if sliding and (self.sliding_window is None or self.sliding_window < 1):
            raise ConfigError(
                f"sliding blocks need a sliding_window of at least 1; given {self.sliding_window!r}."
            )
        if self.sliding_window is not None and not sliding:
            raise ConfigError("sliding_window is given but no block is sliding; set block_types or drop it.")
        if self.local_rope is not None and not (sliding and self.positions == "rope"):
            raise ConfigError(
                "local_rope is for sliding blocks with rotary positions, of which there are none."
            )

    def _check_value_residual(self) -> None:
        weights, start = self.value_residual_weights, self.value_residual_start
        if len(weights) != 2:
            raise ConfigError(
                f"value_residual_weights={weights} must be two numbers: of the first block's values and of "
                "the block's own."
            )
        if start < 1:
            raise ConfigError(f"value_residual_start={start!r} must be at least 1: block 0 has the values.")
        if self.value_residual in ("none", "shared") and weights != (0.5, 0.5):
            raise ConfigError(
                f"value_residual_weights={weights} have no effect with value_residual "
                f"{self.value_residual!r}; choose 'fixed' or 'learned'."
            )
        if self.value_residual == "none" and start != 1:
            raise ConfigError(
                f"value_residual_start={start} has no effect with value_residual 'none'; leave it out."
            )


def _as_tuples(value: Any) -> Any:
    """Lists, which JSON makes of tuples, as tuples."""
    return tuple(_as_tuples(v) for v in value) if isinstance(value, list | tuple) else value
