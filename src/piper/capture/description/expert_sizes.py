"""Numbers of rows and experts that a trace wrote down: `arange(counts.shape[0])` holds a constant.

A share of the experts has other numbers. A graph says neither where a constant came from nor
whether it is only equal to one of them, so each reading is a candidate. At the sizes of the trace
all candidates are the same; a trial at other sizes shows which of them is right.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
from torch import fx

from piper.capture import torch_private
from piper.capture.fx_nodes import value

aten = torch.ops.aten
SIZES = re.compile(r"SymInt\S* (\w+)")  # names of arguments in the text of a schema
INDICES = (aten.select.int, aten.select_scatter.default)  # their SymInt is no size
PLAIN_NUMBERS = {  # sizes that a schema does not call so
    aten.arange: "end",
    aten.one_hot: "num_classes",
    aten.bincount: "minlength",
}
MOST = 64  # candidates: only small regions have so many


@dataclass(frozen=True, slots=True)
class Constant:
    """A number in the arguments of a node, at a position inside a list if it is in one."""

    node: int  # its position in the graph
    argument: int | str
    item: int | None
    readings: tuple[fx.Node | None, ...]  # arguments of the graph whose first size it may be


def candidates(
    module: fx.GraphModule, experts: fx.Node, rows: fx.Node | None
) -> Iterator[fx.GraphModule]:
    """The graph as it is, then with every size that can follow a tensor, then with some of them.

    `experts` and `rows` are arguments whose first sizes are these numbers.
    """
    sources = [experts] if rows is None else [experts, rows]
    found = list(_constants(module.graph, sources))
    yield module
    choices = product(*(one.readings for one in found))
    for choice in islice(choices, MOST):
        if any(source is not None for source in choice):
            yield _following(module, found, choice)


def _constants(graph: fx.Graph, sources: Sequence[fx.Node]) -> Iterator[Constant]:
    for position, node in enumerate(graph.nodes):
        if isinstance(node.target, torch_private.OpOverload) and node.target not in INDICES:
            for name, found in _sizes(node):
                items = enumerate(found) if isinstance(found, list | tuple) else [(None, found)]
                for item, number in items:
                    fit = tuple(one for one in sources if _is_size(number, one))
                    if fit:
                        yield Constant(position, name, item, (*fit, None))


def _sizes(node: fx.Node) -> Iterator[tuple[int | str, Any]]:
    """The arguments that are sizes."""
    more = PLAIN_NUMBERS.get(node.target.overloadpacket)
    names = [*SIZES.findall(torch_private.schema_text(node)), more]
    for position, name in enumerate(torch_private.argument_names(node)):
        if name in names and position < len(node.args):
            yield position, node.args[position]
        elif name in names and name in node.kwargs:
            yield name, node.kwargs[name]


def _is_size(number: Any, source: fx.Node) -> bool:
    size = value(source).shape[0]
    return type(number) is int and type(size) is int and number == size


def _following(
    module: fx.GraphModule, constants: Sequence[Constant], choice: Sequence[fx.Node | None]
) -> fx.GraphModule:
    """A copy of the graph in which these constants are the sizes of its arguments."""
    made = fx.GraphModule(module, copy.deepcopy(module.graph))
    nodes, names = list(made.graph.nodes), {node.name: node for node in made.graph.nodes}
    sizes: dict[str, fx.Node] = {}
    for constant, source in zip(constants, choice, strict=True):
        if source is None:
            continue
        if source.name not in sizes:
            sizes[source.name] = _size_of(made.graph, names[source.name])
        _put(nodes[constant.node], constant, sizes[source.name])
    made.recompile()
    return made


def _size_of(graph: fx.Graph, source: fx.Node) -> fx.Node:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        made = graph.call_function(aten.sym_size.int, (source, 0))
    made.meta["val"] = value(source).shape[0]
    return made


def _put(node: fx.Node, constant: Constant, size: fx.Node) -> None:
    if isinstance(constant.argument, int):
        node.update_arg(constant.argument, _with(node.args[constant.argument], constant, size))
    else:
        found = _with(node.kwargs[constant.argument], constant, size)
        node.update_kwarg(constant.argument, found)


def _with(given: Any, constant: Constant, size: fx.Node) -> Any:
    if constant.item is None:
        return size
    items = list(given)
    items[constant.item] = size
    return items
