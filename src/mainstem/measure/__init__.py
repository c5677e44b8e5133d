"""Numbers from the residual stream: pure functions and mergeable, streaming reducers. Needs torch only."""

from mainstem.measure.events import Batch, BlockEvent, Reducer, SublayerEvent, Write

__all__ = ["Batch", "BlockEvent", "Reducer", "SublayerEvent", "Write"]
