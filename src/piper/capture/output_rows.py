"""In which dimension the outputs of a model have the rows of its batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from piper.capture import torch_private
from piper.capture.fx_nodes import value
from piper.capture.precision import Precision
from piper.capture.trace.arguments.inputs import Inputs, inputs_of
from piper.capture.trace.arguments.outputs import Output, is_tensor
from piper.capture.trace.forward import output_graph
from piper.capture.trace.row_calls.unvalued_run import output_of


@dataclass(frozen=True)
class OutputRows:
    """Of each tensor that a model returns for this example, which ends with labels."""

    model: nn.Module
    output: Output
    example: tuple[Any, ...]
    whole: frozenset[int]
    device: str
    precision: Precision | None

    @property
    def inputs(self) -> Inputs:
        return inputs_of(self.example, self.whole)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(leaf[0]) for leaf in self.output[0] if is_tensor(leaf)]

    def dimensions(self) -> tuple[int | None, ...]:
        """None: it has none, or several.

        A size that equals the number of rows by chance does not grow with it.
        """
        rows, found = self.inputs.rows or 0, self.with_twice_the_rows()
        if found is None:
            return tuple(0 if shape[:1] == (rows,) else None for shape in self.shapes)
        return tuple(
            _grown(one, other, rows) for one, other in zip(self.shapes, found, strict=True)
        )

    def unclear_dimensions(self) -> tuple[int | None, ...]:
        """The first dimension that grows with the rows of its batch, which is the second of what
        recurrent layers return.

        Empty if sizes say that it is the first, or if the model does not run with more rows.
        """
        rows = self.inputs.rows
        if not rows or not any(_is_unclear(shape, rows) for shape in self.shapes):
            return ()
        found = self.with_twice_the_rows() or []
        pairs = zip(self.shapes, found, strict=bool(found))
        return tuple(next(iter(_moved(one, other)), None) for one, other in pairs)

    def with_twice_the_rows(self) -> list[tuple[int, ...]] | None:
        """The shapes that a model returns. None: it does not run."""
        try:
            with torch_private.fake_errors_unlogged(), torch.enable_grad():
                twice = self.inputs.with_rows(2 * (self.inputs.rows or 0))
                graph = output_graph(self.model, twice, self.device, self.precision).graph
        except Exception:  # whatever it is
            return None
        returned = graph.output_node().args[0][0].args[0]
        return [tuple(value(_returned(one)).shape) for one in returned]

    def numbers_of_twice(self, loss_fn: Callable[..., Any]) -> Output | None:
        """The output with the Python numbers, such as `len(x)`, that the model returns for twice
        the rows. None: they are the same."""
        leaves, spec = self.output
        if not any(isinstance(leaf, int | float) for leaf in leaves):
            return None
        given = self.inputs.with_rows(2 * (self.inputs.rows or 0)), self.device, self.precision
        try:
            with torch_private.fake_errors_unlogged():
                found = output_of(self.model, loss_fn, *given)[0]
        except Exception:  # it does not run with twice the rows
            return None
        pairs = zip(leaves, found, strict=len(leaves) == len(found))
        other = [one if is_tensor(one) else twice for one, twice in pairs]
        return (other, spec) if other != leaves else None


def _is_unclear(shape: Sequence[int], rows: int) -> bool:
    if not all(isinstance(size, int) for size in shape):  # some follow from values
        return False
    return len(shape) > 1 and (shape[0] != rows or rows in shape[1:])


def _returned(flat: fx.Node) -> fx.Node:
    """What the model returned, before `joined` detached it and made it flat."""
    while flat.target is not torch.ops.aten.detach.default:
        flat = flat.all_input_nodes[0]
    return flat.all_input_nodes[0]


def _grown(one: Sequence[int], other: Sequence[int], rows: int) -> int | None:
    """
    >>> _grown((2, 2, 3), (2, 4, 3), 2), _grown((2, 2), (4, 4), 2), _grown((6, 3), (12, 3), 2)
    (1, None, None)
    """
    moved = _moved(one, other)
    return moved[0] if len(moved) == 1 and one[moved[0]] == rows else None


def _moved(one: Sequence[int], other: Sequence[int]) -> list[int]:
    if len(one) != len(other):
        return []
    return [k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
