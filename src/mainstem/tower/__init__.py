"""The transformer built from connections. Needs torch only, except :mod:`mainstem.tower.hf`.

config = TowerConfig(vocab_size=50_000, width=256, num_blocks=96, num_heads=4, connection="sandwich_norm")
logits = Tower(config)(token_ids)
"""

from mainstem.tower._attention import Attention
from mainstem.tower._block import Block, ParallelBlock
from mainstem.tower._cache import Cache, KVCache
from mainstem.tower._config import RopeConfig, TowerConfig
from mainstem.tower._feed_forward import FeedForward
from mainstem.tower._model import Tower
from mainstem.tower._places import Place

__all__ = [
    "Attention",
    "Block",
    "Cache",
    "FeedForward",
    "KVCache",
    "ParallelBlock",
    "Place",
    "RopeConfig",
    "Tower",
    "TowerConfig",
]
