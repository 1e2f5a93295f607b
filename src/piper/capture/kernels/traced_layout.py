"""Results in the layout that the trace saw, where a kernel may return another one.

Tensors without values have other strides than real ones after some operators, such as the
derivatives of norms and of many activations; kernels also differ by device. What torch decided in
the trace follows from strides: which kernel of attention can read its arguments, whether a gradient
is copied before a kernel reads its memory in order, which of two factors a determinant has. On
another layout, these kernels give wrong numbers, silently.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import is_contiguous, tensors_of, value
from piper.capture.torch_private import OpOverload, is_mutable, is_view

aten = torch.ops.aten
Strides = tuple[int | None, ...]  # None: known when the graph runs
_EXACT = frozenset({  # operators whose results lie as in the trace, whatever they read
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default,
    aten.embedding.default, aten.embedding_dense_backward.default, aten.add.Tensor,
    aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.clone.default,
})  # fmt: skip
_FOLLOWING = frozenset({  # those whose results are contiguous if what they read is
    aten._to_copy.default, aten.cat.default, aten.stack.default, aten.sum.dim_IntList,
    aten.mean.dim, aten.amax.default, aten._softmax.default, aten._softmax_backward_data.default,
    aten._log_softmax.default, aten._log_softmax_backward_data.default,
    aten.nll_loss_backward.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten.index_select.default, aten.gather.default,
    aten.full.default, aten.slice_backward.default,
})  # fmt: skip


def as_traced(tensor: Tensor, strides: Strides) -> Tensor:
    """The tensor, copied if it lies in memory in another order.

    >>> as_traced(torch.arange(6).view(2, 3), (1, 2)).stride()
    (1, 2)
    """
    if tensor.stride() == strides:
        return tensor
    rows = list(zip(tensor.shape, tensor.stride(), strides, strict=True))
    if any(size == 0 for size, *_ in rows):
        return tensor
    if all(size == 1 or wanted in (own, None) for size, own, wanted in rows):
        return tensor
    order = _order(strides)
    back = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(order).contiguous().permute(back)


def wanted_strides(graph: fx.Graph) -> dict[fx.Node, Strides]:
    """Of each result whose kernel may lay it out in another way than the trace did."""
    return {node: strides for node in graph.nodes if (strides := _wanted(node)) is not None}


def lay_out(graph: fx.Graph, wanted: dict[fx.Node, Strides]) -> None:
    """Change a graph in place: these results are copied if they have other strides."""
    for node, strides in wanted.items():
        with graph.inserting_after(node):
            made = graph.call_function(as_traced, (node, strides))
        made.meta = node.meta
        node.replace_all_uses_with(made, lambda user, own=made: user is not own)


def _wanted(node: fx.Node) -> Strides | None:
    found = value(node)
    if not isinstance(found, Tensor) or found.dim() < 2 or not _may_differ(node):
        return None
    strides = tuple(one if isinstance(one, int) else None for one in found.stride())
    return strides if _is_dense(found.shape, strides) else None


def _may_differ(node: fx.Node) -> bool:
    """Elementwise kernels follow contiguous arguments, in the trace and on a device."""
    if node.op != "call_function":
        return False
    maker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(maker, fx.Node) or not isinstance(maker.target, OpOverload):
        return False
    if is_view(maker) or is_mutable(maker) or maker.target in _EXACT:
        return False
    follows = torch.Tag.pointwise in maker.target.tags or maker.target in _FOLLOWING
    return not (follows and all(map(is_contiguous, _read(maker))))


def _read(node: fx.Node) -> Iterator[Tensor]:
    for one in node.all_input_nodes:
        yield from tensors_of(one)


def _is_dense(shape: Sequence[int | torch.SymInt], strides: Strides) -> bool:
    """Whether there are no gaps, as far as sizes are known: what is expanded stays as it is."""
    step = 1
    for dim in reversed(_order(strides)):
        size, stride = shape[dim], strides[dim]
        if not isinstance(size, int) or stride is None:
            return True
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _order(strides: Strides) -> list[int]:
    """The dimensions from outermost to innermost. Unknown strides are large."""
    return sorted(range(len(strides)), key=lambda dim: -(strides[dim] or _UNKNOWN))


_UNKNOWN = 2**62
