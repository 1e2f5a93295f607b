"""In which dimension the outputs of a model have the rows of its batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from piper.capture import torch_private
from piper.capture.fx_nodes import value
from piper.capture.precision import Precision
from piper.capture.trace.arguments.inputs import inputs_of
from piper.capture.trace.arguments.outputs import Output, is_tensor
from piper.capture.trace.forward import output_graph


def row_dimensions(
    model: nn.Module,
    output: Output,
    example: tuple[Any, ...],
    whole: frozenset[int],
    device: str,
    precision: Precision | None,
) -> tuple[int | None, ...]:
    """Of each tensor that a model returns for this example, which ends with labels. None: it has
    none, or several.

    A size that equals the number of rows by chance does not grow with it.
    """
    inputs = inputs_of(example, whole)
    rows = inputs.rows or 0
    shapes = [tuple(leaf[0]) for leaf in output[0] if is_tensor(leaf)]
    try:
        with torch_private.fake_errors_unlogged(), torch.enable_grad():
            twice = output_graph(model, inputs.with_rows(2 * rows), device, precision).graph
    except Exception:  # with twice the rows, a model may not run
        return tuple(0 if shape[:1] == (rows,) else None for shape in shapes)
    found = [tuple(value(_returned(one)).shape) for one in twice.output_node().args[0][0].args[0]]
    return tuple(_grown(one, other, rows) for one, other in zip(shapes, found, strict=True))


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
    if len(one) != len(other):
        return None
    moved = [k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return moved[0] if len(moved) == 1 and one[moved[0]] == rows else None
