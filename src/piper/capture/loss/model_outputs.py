"""Outputs of a model without rows: means over them, sums, which grow with them, and others."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from piper.capture import torch_private
from piper.capture.fx_nodes import line
from piper.capture.loss.calls import Call, base_name
from piper.capture.loss.domain import FIXED, MEAN, MIXED, SUM, Known, Root, Rows
from piper.capture.loss.proof import followed, growing_rows, twins_of
from piper.capture.loss.rules import RULES, is_elementwise, same
from piper.capture.precision import Precision
from piper.capture.torch_private import OpOverload
from piper.capture.trace.arguments.inputs import Inputs, inputs_of
from piper.capture.trace.arguments.outputs import Output, is_tensor
from piper.capture.trace.forward import output_graph

ADDED = frozenset({
    "add", "sub", "rsub", "sum", "mean", "stack", "cat", "reshape", "view", "diagonal", "trace",
})  # fmt: skip
NORMS = frozenset({"linalg_vector_norm", "linalg_norm", "linalg_matrix_norm", "norm"})


@dataclass(frozen=True, slots=True)
class GrowingOutput:
    """A tensor that a model returns: its position among the tensors, and what makes it grow.

    `sum`: it is a plain sum over rows. `growing`: a norm, or a sum beside something else.
    `mean`: it is a mean over rows. `unknown`: it counts as one, and nothing proves that it is.
    """

    position: int
    where: str
    kind: Literal["sum", "growing", "mean", "unknown"]


Tracer = Callable[[Inputs], fx.GraphModule]


def growing_outputs(
    model: nn.Module,
    output: Output,
    example: tuple[Any, ...],
    whole: frozenset[int],
    device: str,
    precision: Precision | None,
    dims: Sequence[int | None] = (),
) -> tuple[GrowingOutput, ...]:
    """Those that follow from all rows. `output`: what the model returns for this example.

    The example ends with labels, which the model does not see. `dims`: where outputs have rows, if
    sizes do not say it.
    """
    inputs = inputs_of(example, whole)
    unknown = [position for position, dim in enumerate(dims) if dim is None]
    without = unknown if dims else _outputs_without_rows(output, inputs.rows or 0)
    several = sum(map(is_tensor, output[0])) > 1
    if not without and not (several and inputs.rows == 1):  # one row looks like a mean of rows
        return ()

    def traced(given: Inputs) -> fx.GraphModule:
        return output_graph(model, given, device, precision)

    found = None
    # With twice the rows, a model may not run.
    with suppress(Exception), torch_private.fake_errors_unlogged(), torch.enable_grad():
        found = _growing(traced, inputs, without)
    if found is not None:
        return tuple(found)
    return tuple(GrowingOutput(position, "", "unknown") for position in without)


def _outputs_without_rows(output: Output, rows: int) -> list[int]:
    """By position among the tensors.

    A vector beside tensors of more dimensions has rows if it has one element for each.
    """
    shapes = [leaf[0] for leaf in output[0] if is_tensor(leaf)]
    most = max(map(len, shapes), default=0)
    return [
        position
        for position, shape in enumerate(shapes)
        if rows and (not shape or shape[0] % rows or (len(shape) == 1 < most and shape[0] != rows))
    ]


def _growing(
    traced: Tracer, inputs: Inputs, without: Collection[int]
) -> list[GrowingOutput] | None:
    """None if two numbers of rows have different graphs, as those of a loop over rows do."""
    rows = inputs.rows or 0
    one, two = traced(inputs).graph, traced(inputs.with_rows(2 * rows)).graph
    twins = twins_of(one, two, rows)
    if twins is None:
        return None
    batch = one.find_nodes(op="placeholder")[-len(inputs.tensors) :]
    known = followed(one, growing_rows(batch, twins), frozenset(batch), rows, twins, model=True)
    growth = Growth(known, twins, rows)
    nodes = enumerate(one.output_node().args[0][0].args[0])
    alone = rows == 1
    judged = (_judged(growth, k, node, alone or k in without) for k, node in nodes)
    return [one for one in judged if one is not None]


def _judged(growth: "Growth", position: int, node: fx.Node, without: bool) -> GrowingOutput | None:
    """What a tensor of the output is. None: it has rows, or is the same for all of them."""
    known, cause = growth.known[node], growth.of(node)
    if cause is not None:
        return GrowingOutput(position, line(cause), "sum" if known == SUM else "growing")
    if not without or known == FIXED or isinstance(known, Rows):
        return None
    return GrowingOutput(position, line(node), "mean" if known == MEAN else "unknown")


@dataclass(frozen=True)
class Growth:
    """Looks for sums over rows behind a value, through everything that keeps their growth."""

    known: dict[fx.Node, Known]
    twins: dict[fx.Node, fx.Node]
    rows: int

    def of(self, node: fx.Node) -> fx.Node | None:
        """The sum over rows, or the norm, that makes a value grow."""
        if self.known[node] == SUM or self.is_norm(node):
            return node
        if not isinstance(node.target, OpOverload) or self.is_scaled_by_rows(node):
            return None
        varying = [one for one in node.all_input_nodes if self.known[one] != FIXED]
        if not self.keeps_growth(node, varying):
            return None
        return next(filter(None, map(self.of, varying)), None)

    def keeps_growth(self, node: fx.Node, varying: list[fx.Node]) -> bool:
        """Whether the result grows if any of its inputs does."""
        name = base_name(node)
        if name == "mul":
            return all(self.known[one] == MEAN or self.of(one) for one in varying)
        first = bool(node.all_input_nodes) and node.all_input_nodes[0] in varying
        alone = len(varying) == 1 and first
        return name in ADDED or (alone and (is_elementwise(node) or RULES.get(name) is same))

    def is_norm(self, node: fx.Node) -> bool:
        """Whether this is a norm over rows, rather than one for each of them."""
        if node.op != "call_function" or base_name(node) not in NORMS:
            return False
        over_rows = self.known[node] == MIXED or isinstance(self.known[node], Root)
        return over_rows and isinstance(self.known[node.all_input_nodes[0]], Rows)

    def is_scaled_by_rows(self, node: fx.Node) -> bool:
        """Whether a number among the arguments follows the number of rows."""
        return Call(node, self.twins[node], self.known, self.rows, frozenset()).is_scaled
