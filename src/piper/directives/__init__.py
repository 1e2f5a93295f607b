"""What users write: directives, one file each, and the strategy that lists them."""

from piper.directives.base import Directive
from piper.directives.offload import Offload
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.program import apply
from piper.directives.remat import Remat
from piper.directives.replicate import Replicate
from piper.directives.shard import Shard
from piper.directives.split import Split
from piper.directives.stage import Stage
from piper.directives.strategy import Strategy
from piper.directives.stream import Stream

__all__ = [
    "Directive", "Offload", "Order", "Place", "Remat", "Replicate", "Shard", "Split", "Stage",
    "Strategy", "Stream",
    "apply",
]  # fmt: skip
