"""Whether a loss is rounded to 16 bits before it is a loss."""

import torch
from torch import Tensor

from piper.capture.fx_nodes import value
from piper.capture.trace.arguments.inputs import name_of
from piper.capture.trace.forward import Traced

COARSE = (torch.bfloat16, torch.float16)


def coarse_loss(traced: Traced) -> str:
    """The type to which the loss is rounded, as the mean of coarse numbers is; empty: none.

    A loss in float32 of coarse outputs is not rounded so: what is one number counts here.
    """
    node = traced.results[0]
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        found = value(node)
        # As text: how many elements a mask chooses is known only when the graph runs.
        if not isinstance(found, Tensor) or str(found.numel()) != "1":
            return ""
        if found.dtype in COARSE:
            return name_of(found.dtype)
    return ""
