"""Follow rows through the graph of a loss, operation by operation."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import arguments, closure, paired, value
from piper.capture.loss import (  # noqa: F401  (fill RULES)
    drawn_rows,
    labelled,
    norms,
    shapes,
    writes,
)
from piper.capture.loss.calls import Call, proportional, shape
from piper.capture.loss.domain import FIXED, MIXED, Fixed, Inner, Known, Reduced, Row, Rows, Size
from piper.capture.loss.grouped_rows import as_rows, in_groups
from piper.capture.loss.rules import (
    RULES,
    elementwise,
    is_elementwise,
    pairs_rows,
    works_along_rows,
)
from piper.capture.torch_private import VALUE_WANTED, OpOverload, is_mutable, is_real, pytree

aten = torch.ops.aten
Twins = Mapping[fx.Node, fx.Node]
JOINS = ("cat", "stack", "concat", "concatenate", "hstack", "pad_sequence")


def followed(
    graph: fx.Graph,
    given: Mapping[fx.Node, Known],
    batch: frozenset[fx.Node],
    rows: int,
    twins: Twins | None = None,
    model: bool = False,
    guessed: set[fx.Node] | None = None,
) -> dict[fx.Node, Known]:
    """What is known of each node. `given`: of the placeholders; `batch`: those of the batch.

    `twins`: the same graph for twice the rows. Nothing is assumed then, but inside a `model`:
    operations without a rule are taken to keep rows apart there. `guessed` gets those whose rows
    are not where they were before.
    """
    known: dict[fx.Node, Known] = {}
    own: set[fx.Node] = set()
    guesses = set[fx.Node]() if guessed is None else guessed
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = given.get(node, FIXED)
        elif node.op == "call_function":
            twin = twins[node] if twins is not None else None
            call = Call(node, twin, known, rows, frozenset(own))
            try:
                known[node] = _of_all_rows(call, _result(call, model, guesses))
            except VALUE_WANTED:  # a size that depends on a value, beside another size
                known[node] = MIXED
        else:
            known[node] = _constant(node, twins)
        constant = node.op == "get_attr"
        computed = node.op == "call_function" and all(one in own for one in node.all_input_nodes)
        if node in batch or constant or computed:
            own.add(node)
    return known


def _of_all_rows(call: Call, known: Known) -> Known:
    """What was found, unless other rows show that only some of them are left."""
    return call.checked(known) if isinstance(value(call.node), Tensor) else known


def _constant(node: fx.Node, twins: Twins | None) -> Known:
    """A tensor that the graph holds may be made from the number of rows: `torch.tensor(len(x))`."""
    if node.op != "get_attr" or twins is None:
        return FIXED
    here, there = (_held(one) for one in (node, twins[node]))
    if not isinstance(here, Tensor) or not isinstance(there, Tensor) or not is_real(here):
        return FIXED
    if here.shape != there.shape:
        return MIXED
    return FIXED if torch.equal(here, there) else proportional(here, there)


def _held(node: fx.Node) -> Any:
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found


COUNTED = {"piper.grouped_mm"}  # rows, and how many each expert gets, which all rows decide


def _result(call: Call, lenient: bool, guessed: set[fx.Node]) -> Known:
    node = call.node
    inputs = [call.known[one] for one in node.all_input_nodes]
    if node.target is operator.getitem:
        return Row(node.args[1]) if inputs[0] == Row(None) else inputs[0]
    if node.target is operator.mul and len(inputs) == 1 and isinstance(inputs[0], Size):
        return inputs[0]
    if not isinstance(node.target, OpOverload):
        return FIXED if all(one == FIXED for one in inputs) else MIXED
    if MIXED in inputs and not (lenient and call.name in COUNTED):
        return MIXED
    if any(isinstance(one, Inner) for one in inputs):
        found = in_groups(call)
        guess = lenient and found == MIXED
        return _likely_rows(call, [as_rows(one) for one in inputs]) if guess else found
    if (row := _one_row(call, inputs)) is not None:
        return row
    found = _by_rule(call)
    if found == MIXED and lenient and not any(isinstance(one, Reduced) for one in inputs):
        if pairs_rows(call) and guessed.isdisjoint(closure([node], stop=())):
            return MIXED
        fixed = all(one == FIXED for one in inputs) and not _grows(call) and not call.is_scaled
        found = FIXED if fixed else _likely_rows(call, inputs)
        guessed.update([node] if isinstance(found, Rows) and not _stays(call, found) else ())
    return found


def _one_row(call: Call, inputs: list[Known]) -> Row | None:
    """Any function of one row, unless it joins several."""
    others = {one for one in inputs if one != FIXED}
    found = others.pop() if len(others) == 1 else None
    return found if isinstance(found, Row) and call.name not in JOINS else None


def _likely_rows(call: Call, inputs: list[Known]) -> Known:
    """Inside a model, rows may meet, as batch norm lets them: a microbatch is a batch there."""
    rows = [one for one in inputs if isinstance(one, Rows)]
    if any(not isinstance(one, Rows | Fixed) for one in inputs) or _loses_rows(call):
        return MIXED
    leaves = [v for v in pytree.tree_leaves(value(call.node)) if isinstance(v, Tensor) and v.dim()]
    sizes = list(leaves[0].shape) if leaves else []
    for dim in dict.fromkeys((*(one.dim for one in rows), 0)):
        if dim < len(sizes) and isinstance(sizes[dim], int) and sizes[dim] % call.rows == 0:
            return call.checked(Rows(dim))
    return MIXED


def _stays(call: Call, found: Rows) -> bool:
    """Whether sizes show that rows are where they were before."""
    size = shape(call.node)[found.dim : found.dim + 1]
    pairs = ((shape(one), call.known[one]) for one in call.node.all_input_nodes)
    return any(
        isinstance(known, Rows)
        and known.dim == found.dim
        and sizes[known.dim : known.dim + 1] == size
        for sizes, known in pairs
    )


def _loses_rows(call: Call) -> bool:
    """Such as the largest of all rows, for each feature: features may be as many by chance."""
    return works_along_rows(call) and shape(call.node) != shape(call.node.all_input_nodes[0])


def _by_rule(call: Call) -> Known:
    if call.name in RULES:
        return RULES[call.name](call)
    if is_elementwise(call.node):
        return elementwise(call)
    known = [call.known[one] for one in call.node.all_input_nodes]
    plain = all(one == FIXED for one in known) and not _grows(call)
    return FIXED if plain else MIXED


def _grows(call: Call) -> bool:
    """Whether the result has other sizes for other numbers of rows."""
    if call.twin is None:
        return False
    here, there = (_sizes(node) for node in (call.node, call.twin))
    return here != there


def _sizes(node: fx.Node) -> list[str]:
    leaves = pytree.tree_leaves(value(node))
    return [str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)]


def twins_of(one: fx.Graph, two: fx.Graph, rows: int) -> dict[fx.Node, fx.Node] | None:
    """Each node, with that of the graph for twice the `rows`. None: they call something else.

    Both graphs change in place: nothing runs the second, which only shows what grows.
    """
    for graph in (one, two):
        fill_by_sizes(graph)
        merge_equal(graph)
    found = paired(one, two)
    if found is not None or rows > 1:
        return found
    return paired(without_copies(one), without_copies(two))


def fill_by_sizes(graph: fx.Graph) -> None:
    """Change a graph in place: `h.new_zeros(n)` has no value of h."""
    for node in graph.nodes:
        number = _filling(node)
        if number is None or not all(isinstance(size, int) for size in shape(node)):
            continue
        with graph.inserting_before(node):
            given = {"dtype": value(node).dtype, "device": value(node).device}
            made = graph.call_function(aten.full.default, (list(shape(node)), number), given)
        made.meta = node.meta
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _filling(node: fx.Node) -> int | float | None:
    """The number in all elements of a new tensor that has only the type or size of another."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    name = str(node.target).removeprefix("aten.").rpartition(".")[0]
    if name in ("new_zeros", "zeros_like", "new_ones", "ones_like"):
        return int("ones" in name)
    number = arguments(node)["fill_value"] if name in ("new_full", "full_like") else None
    return number if isinstance(number, int | float) else None


def without_copies(graph: fx.Graph) -> fx.Graph:
    """Change a graph in place: one row is contiguous where several have to be copied."""
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    for view in (aten.view.default, aten._unsafe_view.default):
        for node in graph.find_nodes(op="call_function", target=view):
            node.target = aten.reshape.default  # which copies where it has to
    merge_equal(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return graph


def merge_equal(graph: fx.Graph) -> None:
    """Compute equal expressions once, so that equal masks are one node."""
    seen: dict[str, fx.Node] = {}
    held: dict[int, fx.Node] = {}  # a module that is called twice has its weights twice
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(tensor := _held(node), Tensor):
            first = held.setdefault(id(tensor), node)
            if first is not node:
                node.replace_all_uses_with(first)
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            first = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if first is not node and not is_mutable(node):
                node.replace_all_uses_with(first)


def growing_rows(batch: Iterable[fx.Node], twins: Twins) -> dict[fx.Node, Known]:
    """The same, where a twin shows which tensors are cut."""
    pairs = ((node, value(node).shape, value(twins[node]).shape) for node in batch)
    return {node: FIXED if here == there else Rows(0) for node, here, there in pairs}


def is_rows(tensor: Tensor, rows: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == rows


def batch_rows(node: fx.Node, rows: int) -> Known:
    """A tensor of the batch is cut into microbatches along its first dimension."""
    return Rows(0) if is_rows(value(node), rows) else FIXED
