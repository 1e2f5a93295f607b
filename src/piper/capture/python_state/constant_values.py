"""The values of what a graph computes from constants only: tables, masks, positions.

A table of 8 rows of which 5 are used is the same as one of 5 rows, though graphs differ.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.python_state.graph_equality import attribute
from piper.capture.torch_private import MODE_SWITCHES, constant_of, is_real

LARGEST = 2**24  # elements of a value that is computed
ROUNDING = 64  # times the precision of a type, by which kernels differ for other sizes

Values = dict[fx.Node, Any]


@torch.no_grad()
def constant_values(root: fx.GraphModule, known: Mapping[int, Tensor]) -> Values:
    """The values of nodes that depend on no input. `known`: of tensors without values, by id."""
    found: Values = {}
    for node in root.graph.nodes:
        if node.op == "get_attr":
            found.update(_of_constant(node, attribute(root, node), known))
        elif node.op == "call_function" and _can_run(node, found):
            found.update(_of_call(node, found))
    return found


def _of_constant(node: fx.Node, held: Any, known: Mapping[int, Tensor]) -> Values:
    if id(held) in known:
        return {node: known[id(held)]}
    real = constant_of(held) if isinstance(held, Tensor) else None
    if real is None or not is_real(real) or real.is_meta or real.numel() > LARGEST:
        return {}
    return {node: real.detach().clone()}


def _can_run(node: fx.Node, found: Values) -> bool:
    if node.target in MODE_SWITCHES or not all(one in found for one in node.all_input_nodes):
        return False
    made, tags = node.meta.get("val"), getattr(node.target, "tags", ())
    small = not isinstance(made, Tensor) or made.numel() <= LARGEST
    return small and torch.Tag.nondeterministic_seeded not in tags


def _of_call(node: fx.Node, found: Values) -> Values:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
    try:
        return {node: node.target(*args, **kwargs)}
    except Exception:  # then it is compared by what it is computed from
        return {}


class SameValues:
    """Gives the same key to the same values."""

    def __init__(self) -> None:
        self.seen: dict[Any, list[Tensor]] = {}

    def keys(self, values: Values) -> Iterator[tuple[fx.Node, Any]]:
        """Of the nodes whose values other computations use."""
        for node, one in values.items():
            if isinstance(one, Tensor) and any(user not in values for user in node.users):
                yield node, self.key(one)

    def key(self, value: Tensor) -> Any:
        form = tuple(value.shape), value.dtype
        known = self.seen.setdefault(form, [])
        at = next((k for k, one in enumerate(known) if is_close(one, value)), len(known))
        if at == len(known):
            known.append(value)
        return "value", form, at


def is_close(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    near = ROUNDING * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=near, atol=near, equal_nan=True)
