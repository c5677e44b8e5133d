"""The transformer built from connections. Needs torch only, except :mod:`mainstem.tower.hf`.

config = TowerConfig(vocab_size=50_000, width=256, num_blocks=96, num_heads=4, connection="sandwich_norm")
logits = Tower(config)(token_ids)
"""

from mainstem.tower._attention import Attention, ValueMix
from mainstem.tower._block import Block, ParallelBlock
from mainstem.tower._cache import Cache, KVCache
from mainstem.tower._checkpointing import Checkpointing
from mainstem.tower._compile import compile_blocks
from mainstem.tower._config import RopeConfig, TowerConfig
from mainstem.tower._feed_forward import FeedForward
from mainstem.tower._model import Tower
from mainstem.tower._places import Place
from mainstem.tower.parallel import process_group_left, shard_tower

__all__ = [
    "Attention",
    "Block",
    "Cache",
    "Checkpointing",
    "FeedForward",
    "KVCache",
    "ParallelBlock",
    "Place",
    "RopeConfig",
    "Tower",
    "TowerConfig",
    "ValueMix",
    "compile_blocks",
    "process_group_left",
    "shard_tower",
]
