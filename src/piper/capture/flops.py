"""How much arithmetic a graph does: matrix products, convolutions and attention."""

from contextlib import suppress

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from piper.capture.nodes import value


def count(module: fx.GraphModule) -> float:
    """Floating-point operations of one run. Sizes that depend on data count nothing."""
    return float(sum(map(_flops, module.graph.nodes)))


def _flops(node: fx.Node) -> int:
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    with suppress(Exception):  # the formulas refuse unknown sizes, each in its own way
        return int(formula(*args, **kwargs, out_val=value(node)))
    return 0
