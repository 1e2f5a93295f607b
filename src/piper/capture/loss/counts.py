"""What a mean divides by, as a function of the tensors of a microbatch that any process can run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, assert_never

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import closure, in_order, line
from piper.capture.fx_nodes import value as value_of
from piper.capture.kernels.shipping import from_json, to_json
from piper.capture.loss.calls import base_name
from piper.capture.loss.counted_sums import SHAPES, make_plain
from piper.capture.loss.domain import Average, Chosen, Divisor, Labels, PerRow, Total
from piper.capture.loss.drawn_masks import is_drawn, without_orders
from piper.capture.torch_private import graph_module

aten = torch.ops.aten
LINEAR = ("mean", "sum", "mul", "div", *SHAPES)


@dataclass(frozen=True, slots=True)
class Count:
    """`graph`: from the tensors of a microbatch to a total that adds up over microbatches.

    The loss divides by that total, or by `scale` of it.
    """

    what: str
    graph: str
    scale: str | None = None
    full: int | None = None  # the total if everything counts; None: not known
    empty: bool = False  # whether gradients are zero, not NaN, where nothing counts
    weighed: str = ""  # how, in words, if they do not all count the same
    labels: str | None = None  # how many labels are not ignored: if none, the loss has no numerator
    factor: float = 1.0  # of the total: for rows of other lengths, it may be another


def counted(count: Count, tensors: Sequence[Tensor]) -> float:
    """The total of one microbatch."""
    with torch.no_grad():
        return count.factor * float(_Anywhere(_loaded(count.graph), tensors).run(*tensors))


def is_empty(count: Count, tensors: Sequence[Tensor]) -> bool:
    """Whether it is known that nothing of this microbatch is in the loss. A total of zero does not
    say it: what is divided may come from other rows, as in a sum divided by the positive ones."""
    return count.labels is not None and counted(replace(count, graph=count.labels), tensors) == 0


def divisor(count: Count, total: float) -> float:
    """What the loss of a batch with this total is divided by."""
    if count.scale is None:
        return total
    with torch.no_grad():
        given = torch.tensor(total, dtype=torch.float64)
        return float(_Anywhere(_loaded(count.scale), [given]).run(given))


@cache
def _loaded(text: str) -> fx.GraphModule:
    return from_json(text)


class _Anywhere(fx.Interpreter):
    """Runs a graph on the device of its arguments, wherever it was traced."""

    def __init__(self, module: fx.GraphModule, tensors: Sequence[Tensor]) -> None:
        super().__init__(module)
        self.device = tensors[0].device

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return fx.node.map_aggregate((args, kwargs), self._here)

    def _here(self, found: Any) -> Any:
        if isinstance(found, torch.device):
            return self.device
        if not isinstance(found, Tensor):
            return found
        exact = torch.get_default_dtype() is torch.float64 and found.is_floating_point()
        return found.to(self.device, torch.float64 if exact else found.dtype)  # trials are exact


def count_of(root: fx.GraphModule, batch: Sequence[fx.Node | None], found: Divisor) -> Count | None:
    """A divisor as a function of the batch. None if it is not one number, or is not of the batch.

    It may also depend on parameters or buffers or on what is drawn at random, and be one number for
    each column.
    """
    made = _count_of(root, batch, found)
    if made is None or not isinstance(found, Labels) or found.weight is None:
        return made
    alike = _count_of(root, batch, replace(found, weight=None))
    weighed = ", each by the weight of its class"
    return replace(made, weighed=weighed, labels=alike.graph if alike is not None else None)


def _count_of(
    root: fx.GraphModule, batch: Sequence[fx.Node | None], found: Divisor
) -> Count | None:
    needed = read_by(found)
    if any(node.op == "placeholder" and node not in batch for node in needed):
        return None
    graph = fx.Graph()
    places = [graph.placeholder(f"tensor_{k}") for k in range(len(batch))]
    known = {node: place for node, place in zip(batch, places, strict=True) if node is not None}
    copies = _copied(root.graph, graph, needed, known)
    full, scale, empty, factor = None, None, False, 1.0
    match found:
        case Labels(labels, ignored, weight):
            what = f"labels other than {ignored}"
            _count_labels(graph, copies[labels], ignored, copies[weight] if weight else None)
            full, empty = (_numel(labels), True) if weight is None else (None, False)
        case Chosen(mask, alone):
            what = f"elements that the mask in {line(mask) or 'the loss'} chooses"
            graph.output(graph.call_function(aten.sum.default, (copies[mask],)))
            full, empty = _numel(mask), alone
        case Total(total, value, factor):
            what = f"what {line(value) or 'the loss'} divides by"
            graph.output(copies[total])
            full, scale = _full(total), None if value is total else _scale(root, total, value)
        case Average(value):
            what = f"what {line(value) or 'the loss'} divides by"
            elements = _averaged(value)
            if elements is None:
                return None
            empty = found.zeroed
            graph.output(graph.call_function(aten.mul.Tensor, (copies[value], elements)))
        case PerRow():
            return None
        case _:
            assert_never(found)
    if isinstance(found, Average) and value_of(found.value).numel() > 1:
        return None
    if isinstance(found, Total) and value_of(found.total).numel() > 1:
        return None
    without_orders(graph)
    make_plain(graph)
    if is_drawn(graph):
        return None
    full = None if full is None else round(full * factor)
    return Count(what, _text(root, graph), scale, full, empty, factor=factor)


def read_by(found: Divisor) -> set[fx.Node]:
    """All nodes that a divisor is computed with."""
    return closure(_ends(found), ())


def merged(counts: Iterable[Count]) -> tuple[Count, ...]:
    """Each once, whatever words there are for it. If nothing counts, any of them may give NaN."""
    found: dict[tuple[str, str | None, float], Count] = {}
    for one in counts:
        key = one.graph, one.scale, one.factor
        known = found.setdefault(key, one)
        both = replace(known, full=known.full or one.full, empty=known.empty and one.empty)
        found[key] = both
    return tuple(found.values())


def _ends(found: Divisor) -> list[fx.Node]:
    """The nodes from which a divisor is computed."""
    match found:
        case Labels(labels, _, weight):
            return [labels] if weight is None else [labels, weight]
        case Chosen(mask=mask):
            return [mask]
        case Total(total, _):
            return [total]
        case Average(value):
            return [value]
        case PerRow():
            return []
        case _:
            assert_never(found)


def _averaged(value: fx.Node) -> float | None:
    """What a sum over rows is divided by in a mean: times it, those of microbatches add up.

    That of a mean over rows and tokens differs between replicas of rows of different lengths.
    """
    node, factor, is_found = value, 1.0, False
    while len(node.all_input_nodes) == 1 and (base_name(node) in LINEAR or not is_found):
        (source,) = node.all_input_nodes
        name, other = base_name(node), node.args[1] if len(node.args) > 1 else None
        if name == "mean":
            if not (many := _numel(source)) or not (left := _numel(node)):
                return None
            factor *= many / left
        if name in ("div", "mul") and isinstance(other, int | float) and other:
            factor *= other if name == "div" else 1 / other
        is_found = is_found or name in ("mean", "sum")
        node = source
    return factor if is_found else None


def _copied(
    source: fx.Graph, graph: fx.Graph, needed: Iterable[fx.Node], copies: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    for node in in_order(source, needed):
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies


def _count_labels(graph: fx.Graph, labels: fx.Node, ignored: int, weight: fx.Node | None) -> None:
    counts = graph.call_function(aten.ne.Scalar, (labels, ignored))
    if weight is not None:
        label = graph.call_function(aten.mul.Tensor, (labels, counts))
        weighed = graph.call_function(aten.index.Tensor, (weight, [label]))
        counts = graph.call_function(aten.mul.Tensor, (weighed, counts))
    graph.output(graph.call_function(aten.sum.default, (counts,)))


def _scale(root: fx.GraphModule, total: fx.Node, value: fx.Node) -> str:
    graph = fx.Graph()
    given, dtype = graph.placeholder("total"), value_of(total).dtype
    typed = graph.call_function(aten._to_copy.default, (given,), {"dtype": dtype})
    copies = _copied(root.graph, graph, closure([value], {total}), {total: typed})
    graph.output(copies[value])
    return _text(root, graph)


def _text(root: fx.GraphModule, graph: fx.Graph) -> str:
    """Equal for equal counts, whatever the nodes of the loss were called."""
    called = (node for node in graph.nodes if node.op == "call_function")
    for number, node in enumerate(called):
        node.name = f"value_{number}"
    return to_json(graph_module(root, graph))


def _numel(node: fx.Node) -> int | None:
    sizes = value_of(node).shape
    return int(sizes.numel()) if all(isinstance(size, int) for size in sizes) else None


def _full(total: fx.Node) -> int | None:
    """The largest sum of a mask is the number of its elements."""
    first = total.args[0] if total.target is aten.sum.default else None
    masked = isinstance(first, fx.Node) and value_of(first).dtype is torch.bool
    return _numel(first) if masked and isinstance(first, fx.Node) else None
