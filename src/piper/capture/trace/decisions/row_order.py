"""Where values of a graph have the rows of the batch: in which dimension, and in which order.

Sizes of two traces show the dimension: it grows with the rows. Where several elements of it belong
to a row, they do not show the order: [rows * tokens], or [tokens * rows]. So views are followed
from tensors whose order is known, in both directions.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import arguments, value
from piper.capture.torch_private import pytree

VIEWS = frozenset({
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze",
    "unsqueeze",
})  # fmt: skip
REPEATS = {"repeat": "repeats", "tile": "dims"}
PARTS = frozenset({"split", "chunk", "split_with_sizes", "unbind"})
ALONG = PARTS | {
    "softmax", "log_softmax", "_softmax", "select", "slice", "narrow", "cat", "stack", "sum",
    "mean", "squeeze", "unsqueeze", "cumsum", "glu",
}  # fmt: skip
LEADING = frozenset({  # the first dimension of their first argument stays
    "linear", "matmul", "mm", "bmm", "layer_norm", "rms_norm", "scaled_dot_product_attention",
    "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "bernoulli", "rrelu",
    "rand_like", "randn_like", "randint_like", "normal_functional", "uniform", "exponential",
    "clone", "contiguous", "to", "_to_copy", "detach", "alias", "type_as", "masked_fill",
    "zeros_like", "ones_like", "empty_like", "full_like",
})  # fmt: skip


def operation(node: fx.Node) -> str:
    """The name of an operator of torch, without its overload."""
    return str(node.target).removeprefix("aten.").rpartition(".")[0]


def sizes(node: fx.Node) -> list[str]:
    """Of the first tensor that it gives. Some are known only when the graph runs."""
    leaves = [leaf for leaf in pytree.tree_leaves(value(node)) if isinstance(leaf, Tensor)]
    return list(map(str, leaves[0].shape)) if leaves else []


def rows_first(graph: fx.Graph, batch: Collection[fx.Node], rows: int) -> set[fx.Node]:
    """Values that are known to have all that belongs to a row together, one row after the other.

    It takes one graph, and most models: what it does not know is not in the set.
    """
    found = {node for node in batch if sizes(node)[:1] == [str(rows)]}
    for node in graph.nodes:
        inputs = [one for one in node.all_input_nodes if one in found]
        if node.op == "call_function" and inputs and _stays_first(node, inputs, rows):
            found.add(node)
    return found


def _stays_first(node: fx.Node, inputs: Sequence[fx.Node], rows: int) -> bool:
    """Whether the first dimension has rows, if that of these inputs has."""
    name, after, before = operation(node), sizes(node), sizes(inputs[0])
    if name in VIEWS - ALONG and after and after[0] != before[0]:
        return rows > 1 and after[0].isdigit() and int(after[0]) % rows == 0
    if after[:1] != before[:1]:
        return False
    if name in VIEWS - ALONG or node.target is operator.getitem:
        return True
    if name in ALONG:
        return not _works_along(node, 0)
    if name in ("embedding", "addmm"):  # beside a table, or something to add
        return node.args[1] in inputs
    if name in ("transpose", "permute"):
        return _keeps_first(node, len(after))
    alike = all(len(sizes(one)) == len(after) and sizes(one)[0] == after[0] for one in inputs)
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return alike and (pointwise or (name in LEADING and node.args[0] is inputs[0]))


def _works_along(node: fx.Node, dim: int) -> bool:
    """Whether an operator that names dimensions works along this one, or along all."""
    found = arguments(node).get("dim")
    made = operation(node) in ("stack", "unsqueeze")
    count = len(sizes(node if made else node.all_input_nodes[0]))
    named = [found] if isinstance(found, int) else found
    return not named or dim in [one % max(count, 1) for one in named]


def _keeps_first(node: fx.Node, count: int) -> bool:
    given = arguments(node)
    if operation(node) == "permute":
        return given["dims"][0] % count == 0
    return 0 not in (given["dim0"] % count, given["dim1"] % count)


class RowOrder:
    """Of the nodes of a graph. `twins`: the same nodes for so many `times` the rows."""

    def __init__(
        self, twins: Mapping[fx.Node, fx.Node], batch: Collection[fx.Node], rows: int, times: int
    ) -> None:
        self.rows, self.sizes = rows, {node: sizes(node) for node in twins}
        pairs = (
            (node, grown(self.sizes[node], sizes(twin), times)) for node, twin in twins.items()
        )
        self.dims = {node: dim for node, dim in pairs if dim is not None}
        self.groups = {node: 1 for node in self.dims if node in batch or self.size(node) <= rows}
        self._follow()

    def of(self, node: fx.Node) -> tuple[int, int] | None:
        """The dimension, and in how many groups of all rows. None: it is not known."""
        return (self.dims[node], self.groups[node]) if node in self.groups else None

    def size(self, node: fx.Node) -> int:
        return int(self.sizes[node][self.dims[node]])

    def _follow(self) -> None:
        """Forwards and backwards, until nothing more is found."""
        open_ = [node for node in self.dims if node not in self.groups]
        while open_:
            before = len(self.groups)
            for node in open_:
                self._add(node, self._from_inputs(node))
            for node in reversed(open_):
                self._add(node, self._from_users(node))
            if len(self.groups) == before:
                return
            open_ = [node for node in open_ if node not in self.groups]

    def _add(self, node: fx.Node, groups: int | None) -> None:
        if groups and node not in self.groups and self.size(node) % (groups * self.rows) == 0:
            self.groups[node] = groups

    def _from_inputs(self, node: fx.Node) -> int | None:
        inputs = [one for one in node.all_input_nodes if one in self.groups]
        name = operation(node)
        if not inputs:
            return None
        if name in VIEWS:
            return self._viewed(inputs[0], node)
        if name in ("cat", "concat") and _works_along(node, self.dims[node]):
            return self._joined(node)
        if name in REPEATS:
            times = arguments(node)[REPEATS[name]]
            return self.groups[inputs[0]] * times[self.dims[node] - len(self.sizes[node])]
        found = {self.groups[one] for one in inputs if self._alike(one, node)}
        return found.pop() if len(found) == 1 else None

    def _joined(self, node: fx.Node) -> int | None:
        """All rows of one tensor after all of another."""
        parts = node.args[0]
        one = {(self.groups.get(part), str(self.sizes[part])) for part in parts}
        return len(parts) if len(one) == 1 and one.pop()[0] == 1 else None

    def _from_users(self, node: fx.Node) -> int | None:
        found = (self._from_user(node, user) for user in node.users if user in self.groups)
        return next(filter(None, found), None)

    def _from_user(self, node: fx.Node, user: fx.Node) -> int | None:
        name = operation(user)
        if name in VIEWS:
            return self._viewed(user, node)
        if name in PARTS | {"slice", "narrow"}:
            return self._of_part(node, user)
        plain = name not in ("cat", "concat", *REPEATS)
        return self.groups[user] if plain and self._alike(user, node) else None

    def _of_part(self, node: fx.Node, part: fx.Node) -> int | None:
        """A part with all rows: those of one group, or one element of each row."""
        if self._alike(part, node):
            return self.groups[part]
        if self.size(part) != self.rows:
            return None
        return 1 if arguments(part).get("step", 1) != 1 else self.size(node) // self.rows

    def _alike(self, one: fx.Node, other: fx.Node) -> bool:
        return self.size(one) == self.size(other)

    def _viewed(self, one: fx.Node, other: fx.Node) -> int | None:
        """The same elements in another shape: as many of them come before the rows."""
        outer = self._before(one) * self.groups[one]
        groups, rest = divmod(outer, self._before(other))
        return None if rest else groups

    def _before(self, node: fx.Node) -> int:
        before = self.sizes[node][: self.dims[node]]
        return prod(map(int, before)) if all(one.isdigit() for one in before) else 0


def grown(one: Sequence[str], other: Sequence[str], times: int) -> int | None:
    """The dimension that is so many `times` as large. None: there is none, or something else.

    >>> grown(["4", "2"], ["4", "6"], 3), grown(["2", "2"], ["6", "6"], 3), grown(["3"], ["7"], 3)
    (1, None, None)
    """
    if len(one) != len(other) or not all(size.isdigit() for size in (*one, *other)):
        return None
    moved = [dim for dim, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    known = len(moved) == 1 and int(other[moved[0]]) == times * int(one[moved[0]])
    return moved[0] if known else None
