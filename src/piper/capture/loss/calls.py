"""One operation in the graph of a loss, with what is known of its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor, fx

from piper.capture.fx_nodes import arguments, value
from piper.capture.loss.domain import FIXED, MIXED, Fixed, Inner, Known, Number, Rows


@dataclass(frozen=True)
class Call:
    """`twin` is the same operation on twice the rows. Without one, sizes are only plausible."""

    node: fx.Node
    twin: fx.Node | None
    known: Mapping[fx.Node, Known]
    rows: int
    own: frozenset[fx.Node]  # nodes that depend on nothing but the batch's own tensors

    @property
    def name(self) -> str:
        return base_name(self.node)

    @cached_property
    def given(self) -> dict[str, Any]:
        """Arguments by name."""
        return arguments(self.node)

    @cached_property
    def given_twin(self) -> dict[str, Any]:
        return self.given if self.twin is None else arguments(self.twin)

    @cached_property
    def tensors(self) -> dict[str, fx.Node]:
        """The arguments that are tensors, by name."""
        return {n: a for n, a in self.given.items() if isinstance(a, fx.Node)}

    def of(self, name: str) -> Known:
        """What is known of an argument. A number that grows with the rows is told by the twin."""
        given, twin = self.given.get(name), self.given_twin.get(name)
        if isinstance(given, fx.Node):
            return self.known[given]
        if not isinstance(given, int | float) or given == twin or given != given:  # NaN
            return FIXED
        return proportional(given, twin) if isinstance(twin, int | float) else MIXED

    @property
    def is_scaled(self) -> bool:
        """Whether a number among the arguments follows that of the rows."""
        return any(self.of(name) != FIXED for name in self.given if name not in self.tensors)

    def is_own(self, name: str) -> bool:
        return self.given.get(name) in self.own

    def dims(self, name: str = "dim") -> list[int] | None:
        """The dimensions that an argument names, counted from the front. None: all of them."""
        found = self.given.get(name)
        if found is None or found == []:
            return None
        count = max(1, len(shape(next(iter(self.tensors.values())))))
        return [d % count for d in ([found] if isinstance(found, int) else found)]

    def checked(self, known: Known) -> Known:
        """What was found, if the twin has twice the size in this dimension and only there."""
        if not isinstance(known, Rows) or self.twin is None or known.mask is not None:
            return known
        here, there = shape(self.node), shape(self.twin)
        doubled = tuple(2 * size if d == known.dim else size for d, size in enumerate(here))
        return known if there == doubled else MIXED

    def viewed(self, known: Rows) -> Known:
        """The rows of a tensor that gets another shape, if they stay together."""
        if known.mask is not None:
            return MIXED
        before, after = shape(next(iter(self.tensors.values()))), shape(self.node)
        outer = prod(before[: known.dim])
        for dim, size in enumerate(after):
            grows = self.twin is None or shape(self.twin)[dim] == 2 * size
            if prod(after[:dim]) == outer and size % self.rows == 0 and grows:
                return Rows(dim, known.over)
        return self.grouped(outer) if known.over is None else MIXED

    def grouped(self, outer: int) -> Known:
        """So many groups of all rows, in another shape. Only a twin shows where rows are then."""
        for dim, size in enumerate(shape(self.node) if self.twin is not None else ()):
            groups, rest = divmod(outer, prod(shape(self.node)[:dim]))
            fits = groups and not rest and size % (groups * self.rows) == 0
            if fits and self.checked(Rows(dim)) != MIXED:
                return Rows(dim) if groups == 1 else Inner(dim, groups)
        return MIXED


def proportional(here: Any, there: Any) -> Known:
    """A number, or a tensor, that is another one for twice the rows."""
    for power in (1, -1):
        same = there == here * 2**power
        if bool(same.all() if isinstance(same, Tensor) else same):
            return Number(power)
    return MIXED


def base_name(node: fx.Node) -> str:
    """Of an operator, without its overload: `sum`; `piper.ctc` for one of Piper's."""
    return str(node.target).removeprefix("aten.").rpartition(".")[0]


def shape(node: fx.Node) -> tuple[Any, ...]:
    found = value(node)
    return tuple(found.shape) if isinstance(found, Tensor) else ()


def aligned(call: Call, names: list[str]) -> Known:
    """Tensors that are combined element by element: rows must meet their own rows only."""
    return beside(call, [call.tensors[name] for name in names if name in call.tensors])


def beside(call: Call, nodes: list[fx.Node]) -> Known:
    """Tensors that are broadcast together."""
    rows = [(node, known) for node in nodes if isinstance(known := call.known[node], Rows)]
    ends = {(len(shape(node)) - known.dim, known.mask) for node, known in rows}
    if len(ends) != 1 or any(known.dim >= len(shape(node)) for node, known in rows):
        return MIXED  # the second: one row whose dimension was squeezed away
    ((end, mask),) = ends
    sizes = {shape(node)[known.dim] for node, known in rows} if mask is None else {0}
    fixed = [shape(node) for node in nodes if call.known[node] == Fixed()]
    meets = any(len(size) >= end and size[-end] != 1 for size in fixed)
    if len(sizes) != 1 or (meets and call.twin is not None):
        return MIXED
    overs = [known.over for _, known in rows if known.over is not None]
    count = max(len(shape(node)) for node in nodes)
    return Rows(count - end, overs[0] if overs else None, mask)
