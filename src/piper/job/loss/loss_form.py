"""What can be proved of a loss: of a function, or of what the model computes itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from piper.capture import Captured, Precision
from piper.capture.loss import LossForm, function_form, growing_outputs, own_form
from piper.capture.output_rows import OutputRows
from piper.capture.trace.arguments.inputs import inputs_of


def is_settled(form: LossForm, said: bool) -> bool:
    """Whether what the graph of a model shows of its own loss is enough.

    A sum may be divided by a number that is made from that of the rows. A graph of one row shows
    nothing, though its user says what the loss is.
    """
    return form.kind == "mean" or (said and form.kind is not None)


def loss_form(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    captured: Captured,
    example: tuple[Any, ...],
    whole: frozenset[int],
    device: str,
    precision: Precision | None,
) -> LossForm:
    """For a microbatch like this `example`."""
    types = device, precision
    if loss_fn is None:
        unproved = replace(captured.form, kind=None)
        return own_form(model, inputs_of(example, whole), *types, unproved)
    output = captured.output
    rows = OutputRows(model, output, example, whole, *types)
    dims = rows.unclear_dimensions()
    growing = growing_outputs(model, output, example, whole, *types, dims)
    twice = rows.numbers_of_twice(loss_fn)
    given = output, example, captured.form, whole, growing, dims, twice
    found = function_form(loss_fn, *given)
    return found if twice is None else replace(found, numbered=found.kind is None)
