"""Run a model and its loss once on tensors without values, to see whether they run, and how."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from piper.capture.autograd_private import run_backward
from piper.capture.precision import TYPES, Precision
from piper.capture.python_state.snapshot import Snapshot
from piper.capture.trace.arguments.fakes import fake_input
from piper.capture.trace.arguments.inputs import Inputs
from piper.capture.trace.arguments.outputs import Output
from piper.capture.trace.decisions.random_decisions import RandomDecisions
from piper.capture.trace.forward import Attempt, Loss, model_output, scalar_loss
from piper.capture.trace.functions import entered
from piper.capture.trace.row_calls.recorded_calls import RecordedCall, RecordedCalls
from piper.capture.trace.tracing import tracing


class OtherLabelsFail(Exception):
    """The loss runs, but not with the other labels."""


def run_once(
    model: nn.Module,
    loss_fn: Loss | None,
    inputs: Inputs,
    device: str,
    precision: Precision | None,
    others: Inputs | None = None,
) -> None:
    """Raises what the model and its loss raise.

    `others` are inputs with other labels, of which the loss is computed, too, for the same output.
    """
    attempt = Attempt(model, loss_fn, inputs, device, precision)
    with _running(attempt):
        _forward(attempt, others)


def output_of(
    model: nn.Module,
    loss_fn: Loss | None,
    inputs: Inputs,
    device: str,
    precision: Precision | None,
) -> Output:
    """What the model returns, with sizes in place of tensors."""
    attempt = Attempt(model, loss_fn, inputs, device, precision)
    with _running(attempt):
        _forward(attempt, None)
    return attempt.seen[-1]


def calls_of(
    model: nn.Module,
    loss_fn: Loss | None,
    inputs: Inputs,
    device: str,
    precision: Precision | None,
) -> list[RecordedCall]:
    """What the model and its loss call; and their backward, if they have autograd.Functions."""
    attempt = Attempt(model, loss_fn, inputs, device, precision)
    calls = RecordedCalls(attempt.seen)
    with _running(attempt), entered(calls.of_backward) as ran, calls:
        loss = _forward(attempt, None)
        if ran:
            calls.silent = True
            with suppress(Exception):  # one that needs values
                run_backward(loss)
    return calls.calls


@contextmanager
def _running(attempt: Attempt) -> Iterator[None]:
    opened = tracing(attempt.model, attempt.view, attempt.mode, attempt.precision)
    with opened, RandomDecisions():
        before = Snapshot(attempt.reach)
        try:
            yield
        finally:
            before.restore()


def _forward(attempt: Attempt, others: Inputs | None) -> Tensor:
    weights, buffers, batch = attempt.fakes()
    named = zip([*attempt.parameters, *attempt.buffers], [*weights, *buffers], strict=True)
    state, arguments = dict(named), attempt.inputs.join(batch)
    dtype = TYPES[attempt.precision.output] if attempt.precision else None
    loss_fn = attempt.loss.bound(state)
    output = model_output(attempt.view, state, loss_fn, arguments, attempt.seen, dtype)
    loss = scalar_loss(output, loss_fn, arguments)
    if others is not None:
        _try_others(output, loss_fn, others, attempt.device)
    return loss


def _try_others(output: Any, loss_fn: Loss | None, others: Inputs, device: str) -> None:
    given = others.join([fake_input(spec, device) for spec in others.tensors])
    try:
        scalar_loss(output, loss_fn, given)
    except Exception as error:
        raise OtherLabelsFail from error
