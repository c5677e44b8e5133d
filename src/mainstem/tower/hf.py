"""The Hugging Face face of a tower: ``generate``, ``save_pretrained``, ``from_pretrained``, ``Trainer``.

Importing this module registers both classes with ``AutoConfig`` and ``AutoModelForCausalLM``. Needs
``mainstem[hf]``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mainstem.errors import ConfigError, MissingExtraError, SourceError
from mainstem.tower._config import TowerConfig
from mainstem.tower._model import Tower

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        DynamicCache,
        GenerationMixin,
        PretrainedConfig,
        PreTrainedModel,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as error:
    raise MissingExtraError("The Hugging Face face of a tower", "transformers", "hf") from error

_OUTPUT_FIELDS = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
# transformers 5.24 renamed the field and the argument.
_CACHE = "cache" if "cache" in _OUTPUT_FIELDS else "past_key_values"


class MainstemConfig(PretrainedConfig):
    """A :class:`~mainstem.tower.TowerConfig` in ``transformers``' clothes.

    The tower's config is kept whole in ``tower``; the few names that ``transformers`` itself reads are
    properties of it, so that nothing can disagree.

    Raises:
        ConfigError: ``tower`` cannot be built.
    """

    model_type: ClassVar[str] = "mainstem"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    def __init__(self, tower: TowerConfig | dict[str, Any] | None = None, **kwargs: Any):
        # transformers builds configs without arguments to learn the default values.
        tower = {"vocab_size": 2, "width": 2, "num_blocks": 1, "num_heads": 1} if tower is None else tower
        config = tower if isinstance(tower, TowerConfig) else TowerConfig.from_dict(tower)
        self.tower = config.to_dict()
        kwargs["tie_word_embeddings"] = config.tied
        kwargs.setdefault("use_cache", True)
        super().__init__(**kwargs)

    def tower_config(self) -> TowerConfig:
        """Return what the tower is built from."""
        return TowerConfig.from_dict(self.tower)

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        return self.tower["vocab_size"]

    @property
    def hidden_size(self) -> int:
        """Width of the stream."""
        return self.tower["width"]

    @property
    def num_hidden_layers(self) -> int:
        """Blocks."""
        return self.tower["num_blocks"]

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return self.tower["num_heads"]

    @property
    def max_position_embeddings(self) -> int:
        """Positions."""
        return self.tower["max_positions"]


class MainstemForCausalLM(PreTrainedModel, GenerationMixin):
    """A tower with the methods of a ``transformers`` causal language model.

    Caches are dynamic ones; static caches, beam-sharing caches and flash-attention switches are not offered.
    """

    config_class = MainstemConfig
    base_model_prefix = "tower"
    supports_gradient_checkpointing = True
    # transformers declares these as instance attributes.
    _tied_weights_keys = {"tower.head.weight": "tower.token_embedding.weight"}  # noqa: RUF012
    _no_split_modules = ["Block", "ParallelBlock"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: MainstemConfig):
        super().__init__(config)
        self.tower = Tower(config.tower_config())
        if self.tower.config.stream_dtype is not None:  # a loader must not round what the stream needs wide
            self._keep_in_fp32_modules_strict = {"connections", "trunk"}
        if self.tower.token_embedding.weight.device.type != "meta":
            for module in self.tower.modules():
                vars(module)["_is_hf_initialized"] = True  # its values are drawn; post_init would draw others
        self.post_init()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the branches and the embedding; the stream and its norms may be wider."""
        return self.tower.token_embedding.weight.dtype

    @classmethod
    def from_tower(cls, tower: Tower) -> MainstemForCausalLM:
        """Dress a tower; the model holds the very same module."""
        with torch.device("meta"):
            model = cls(MainstemConfig(tower.config))
        model.tower = tower
        model.config.dtype = tower.token_embedding.weight.dtype
        return model.train(tower.training)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return logits, the cache, and with ``labels`` the mean loss of the next token.

        Args:
            input_ids: ``[batch, pos]``.
            attention_mask: ``[batch, past + pos]``, 1 for real tokens.
            position_ids: ``[batch or 1, pos]``; by default the real tokens are numbered from 0.
            cache: a dynamic cache; ``past_key_values`` is its old name.
            past_key_values: see ``cache``.
            labels: ``[batch, pos]``, not shifted; -100 is left out of the loss.
            use_cache: return a cache when none is given; off in training.
            logits_to_keep: logits of that many last positions only; 0 for all.
            return_dict: False for a plain tuple.
            kwargs: ``num_items_in_batch`` for the loss; what a tower cannot do is refused.

        Raises:
            ConfigError: no ``input_ids``, or an argument that a tower does not serve.
        """
        num_items = kwargs.pop("num_items_in_batch", None)
        if refused := sorted(
            name for name, value in kwargs.items() if value is not None and value is not False
        ):
            raise ConfigError(f"a tower does not serve the argument {', '.join(refused)}; leave it out.")
        if input_ids is None:
            raise ConfigError("a tower needs input_ids of shape [batch, pos].")
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache and not self.training:
            cache = DynamicCache()
        logits = self.tower(input_ids, attention_mask, position_ids, cache, logits_to_keep)
        loss = None
        if labels is not None:
            loss_function: Any = self.loss_function
            loss = loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items,
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE: cache})
        return output.to_tuple() if return_dict is False else output

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Any = None,
        every_n_layers: int = 1,
    ) -> None:
        """Serve ``activation_checkpointing_enable`` and ``gradient_checkpointing_enable`` by the tower's own.

        Their keyword arguments may be ``mode`` (:meth:`Tower.checkpoint_activations`; ``"block"`` when not
        given) and ``use_reentrant=False``.

        Raises:
            ConfigError: another argument, reentrant checkpointing, or offloading.
        """
        if not enable:
            self.tower.checkpoint_activations("none")
            return
        given = dict(getattr(gradient_checkpointing_func, "keywords", {}))
        mode = given.pop("mode", "block")
        if given.pop("use_reentrant", False):
            raise ConfigError(
                "a tower checkpoints with use_reentrant=False, which replays dropout and can be compiled; "
                "pass {'use_reentrant': False}, or nothing."
            )
        if given:
            raise ConfigError(
                f"activation checkpointing of a tower has no argument {', '.join(sorted(given))}; "
                "it takes mode='block' or mode='selective'."
            )
        if getattr(gradient_checkpointing_func, "func", checkpoint) is not checkpoint:
            raise ConfigError("a tower does not offload checkpointed activations; leave out offload=True.")
        self.tower.checkpoint_activations(mode, every=every_n_layers)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.tower.token_embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.tower.head

    def _init_weights(self, module: nn.Module) -> None:
        # Called for what a checkpoint lacks. The tower knows its own initial values; transformers' defaults
        # would undo the depth scaling.
        names = {id(inner): name for name, inner in self.tower.named_modules()}
        if id(module) not in names:
            return
        for buffer_name, buffer in module.named_buffers(recurse=False):
            if not getattr(buffer, "_is_hf_initialized", False):
                raise SourceError(
                    f"the checkpoint lacks 'tower.{names[id(module)]}.{buffer_name}', "
                    "which has no initial value; save it again with save_pretrained."
                )
        self.tower.reset_module(names[id(module)])


AutoConfig.register("mainstem", MainstemConfig, exist_ok=True)
AutoModelForCausalLM.register(MainstemConfig, MainstemForCausalLM, exist_ok=True)
