"""Errors of torch in the model or the loss: the line, what it was given, and what to write."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from piper.capture.source_lines import LOSS, is_capture, is_in_model, line_of, loss_arguments
from piper.capture.trace.arguments.inputs import name_of
from piper.capture.trace.arguments.loss_call import described
from piper.errors import CaptureError, PiperError, first_line, is_out_of_memory
from piper.job.batch.batch import Batch, Shapes
from piper.job.batch.call_signatures import misspelt
from piper.job.batch.input_names import input_names
from piper.launcher.script_errors import is_own, own_frames
from piper.names import with_article

RAISE = dis.opmap["RAISE_VARARGS"]
OF_BATCHES = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
LAST = "the last one goes to loss_fn, the others to the model"
ORDER = "it has the same shapes in another order: give it in that of the example"
LIKE_FIRST = "give batches with the sizes and types of the first one, or correct this line"
PLAIN = (
    "give example= what the forward of the model takes, or correct this line; if the model runs "
    "with this batch in plain PyTorch, please report it"
)
INTEGERS = "give class labels as int64: y.long()"
TENSORS = "give labels as a tensor: torch.tensor(labels)"
SIGNATURE = "loss_fn gets (output, labels), in this order: loss_fn=lambda out, y: {}"


@contextmanager
def failures_explained(
    model: torch.nn.Module, loss_fn: Any, batch: Batch, first: Shapes = ()
) -> Iterator[None]:
    """`first`: the shapes of the first batch that could be captured.

    What the user's own code raises stays as it is.
    """
    try:
        yield
    except PiperError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or raised_by_user(error.__traceback__):
            raise
        loss_fn = loss_fn if batch.labelled else None
        found = of_call(error, model, loss_fn, batch, first)
        if found is None:
            raise
        error.__traceback__ = own_frames(error.__traceback__)  # torch's own are pages of frames
        vars(error).pop("__notes__", None)  # which say the same
        raise found from error


def of_call(
    error: Exception, model: torch.nn.Module, loss_fn: Any, batch: Batch, first: Shapes
) -> CaptureError | None:
    """None: it is not about what the model or the loss were called with."""
    trace = error.__traceback__
    has, fix = contents(model, loss_fn, batch, first)
    text = f"{type(error).__name__}: {first_line(error)}"
    if given := loss_arguments(trace):
        output, labels = given
        lines = f"it was given (output, labels): output is {kind_of(output)}, labels are "
        lines += kind_of(labels)
        if fix != LIKE_FIRST:
            wants = wants_integers(text, labels)
            fix = INTEGERS if wants else loss_fix(loss_fn, output, labels)
        fix = TENSORS if is_numbers(labels) else fix
        where = line_of(trace)
        who = "it" if where == LOSS else "loss_fn"
        return CaptureError.of(where, f"{who} raised {text}\n    {lines}\n    {has}", fix)
    inner = innermost(trace)
    own_bug = inner is not None and is_capture(inner.tb_frame.f_code.co_filename)
    if own_bug or not isinstance(error, OF_BATCHES) or not is_in_model(trace):
        return None
    wrong = misspelt(model, batch.arguments if loss_fn is None else batch.arguments[:-1])
    if wrong is not None:
        has += f"\n    {type(model).__name__}.forward names no {wrong[0]}"
        fix = f"write {wrong[1]} in place of {wrong[0]}"
    return CaptureError.of(line_of(trace), f"{text}\n    {has}", fix)


def contents(model: torch.nn.Module, loss_fn: Any, batch: Batch, first: Shapes) -> tuple[str, str]:
    """What a batch has, and what the first one had, if it was another; and what to write."""
    names, mine = input_names(model, loss_fn, batch), list(map(size, batch.tensors))
    known = [f"{list(one[0])} of {name_of(one[1])}" for one in first if isinstance(one, tuple)]
    has = named(names, mine)
    if not known:
        return f"the batch has {has}" + (f"; {LAST}" if loss_fn is not None else ""), PLAIN
    if known == mine:
        return f"this batch has {has}, as the first one had", PLAIN
    if len(known) != len(mine):
        return f"this batch has {has}; the first one had {', '.join(known)}", LIKE_FIRST
    fix = ORDER if sorted(known) == sorted(mine) else LIKE_FIRST
    return f"this batch has {has}; the first one had {named(names, known)}", fix


def named(names: list[str], sizes: list[str]) -> str:
    return ", ".join(map(" ".join, zip(names, sizes, strict=True)))


def size(tensor: torch.Tensor) -> str:
    """
    >>> size(torch.zeros(2, 3))
    '[2, 3] of float32'
    """
    return f"{list(tensor.shape)} of {name_of(tensor.dtype)}"


def wants_integers(error: str, labels: Any) -> bool:
    """Whether labels are numbers with fractions where torch wants classes."""
    floats = isinstance(labels, torch.Tensor) and labels.is_floating_point()
    return floats and bool(re.search(r"int64|Long\b", error))


def kind_of(value: Any) -> str:
    """
    >>> kind_of({"logits": torch.zeros(2)}), kind_of([torch.zeros(2)]), kind_of(torch.zeros(2))
    ('a dict with logits ([2] of float32)', 'a list ([2] of float32)', '[2] of float32')
    """
    if isinstance(value, torch.Tensor):
        return described(value)
    if value is None:
        return "None"
    kind = with_article(type(value).__name__)
    if is_numbers(value):
        return f"{kind} of numbers"
    if isinstance(value, Mapping):
        kind += f" with {', '.join(map(str, value))}"
    return f"{kind} ({described(value)})" if isinstance(value, Mapping | list | tuple) else kind


def is_numbers(value: Any) -> bool:
    """Whether it is a list of numbers of Python, to any depth.

    >>> is_numbers([[1, 2], [3.0]]), is_numbers([]), is_numbers([torch.zeros(2)])
    (True, False, False)
    """
    if not isinstance(value, list | tuple):
        return False
    each = (is_numbers(one) or isinstance(one, int | float) for one in value)
    return bool(value) and all(each)


def loss_fix(loss_fn: Any, output: Any, labels: Any) -> str:
    """The loss function that takes a tensor out of the output, or the order of its arguments."""
    name = getattr(loss_fn, "__name__", "")
    of_torch = getattr(torch.nn.functional, name, None) is loss_fn
    call = f"F.{name}" if of_torch else "F.cross_entropy"
    if isinstance(output, Mapping) and output:
        key = "logits" if "logits" in output else next(iter(output))
        return f"write loss_fn=lambda out, y: {called(call, output[key], f'out[{key!r}]', labels)}"
    if isinstance(output, list | tuple) and output:
        if not any(isinstance(one, torch.Tensor) for one in output):
            return "return tensors from the model: leave out .tolist() and .item()"
        return f"write loss_fn=lambda out, y: {called(call, output[0], 'out[0]', labels)}"
    return SIGNATURE.format(called(call, output, "out", labels))


def called(call: str, output: Any, name: str, labels: Any) -> str:
    """With the tokens of all rows in one dimension, if there is a label for each of them.

    >>> called("F.cross_entropy", torch.zeros(2, 5, 9), "out", torch.zeros(2, 5).long())
    'F.cross_entropy(out.flatten(0, 1), y.flatten())'
    """
    tensors = isinstance(output, torch.Tensor) and isinstance(labels, torch.Tensor)
    if tensors and output.dim() == 3 and labels.shape == output.shape[:2]:
        return f"{call}({name}.flatten(0, 1), y.flatten())"
    return f"{call}({name}, y)"


def raised_by_user(trace: TracebackType | None) -> bool:
    """Whether a `raise` or `assert` in the user's own code has stopped it."""
    inner = innermost(trace)
    if inner is None or not is_own(inner.tb_frame.f_code.co_filename):
        return False
    return inner.tb_frame.f_code.co_code[inner.tb_lasti] == RAISE


def innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace
