"""Buffers that a loss divides by, such as class weights: every process has to know their values."""

from collections.abc import Mapping

from torch import fx, nn

from piper.capture.loss.counts import read_by
from piper.capture.loss.domain import Known, over_of
from piper.capture.torch_private import has_values

HELD = "held_buffer"


def hold_buffers(root: fx.GraphModule, places: Mapping[str, fx.Node], model: nn.Module) -> None:
    """Change a graph in place: buffers are constants of it, as far as they have values."""
    values = dict(model.named_buffers())
    found = ((name, node) for name, node in places.items() if has_values(values[name]))
    for number, (name, node) in enumerate(found):
        setattr(root, target := f"held_{number}", values[name].detach())
        with root.graph.inserting_before(node):
            constant = root.graph.create_node("get_attr", target)
        constant.meta.update({**node.meta, HELD: name})
        node.replace_all_uses_with(constant)


def held_by(loss: Known) -> list[str]:
    """The names of those that a loss divides by."""
    nodes = {node for one in over_of(loss) for node in read_by(one)}
    return sorted(node.meta[HELD] for node in nodes if HELD in node.meta)
