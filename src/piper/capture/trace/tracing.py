"""All that is open while a model is traced, or runs on tensors without values."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, fx, nn

from piper.capture import tracing_private
from piper.capture.marks.annotate import recording
from piper.capture.marks.tags import tagging
from piper.capture.observers import observers_aside
from piper.capture.precision import Precision
from piper.capture.python_state.function_caches import forgetting
from piper.capture.source_lines import is_in_loss, line_of, only_this_thread
from piper.capture.torch_private import VALUE_WANTED
from piper.capture.trace import functions, side_effects
from piper.capture.trace.conversions import converting
from piper.capture.trace.decisions.seeds import refusing_seeds
from piper.capture.trace.hidden_contexts import refusing_hidden_contexts
from piper.capture.trace.replaced.as_in_eager import AsInEager
from piper.capture.trace.replaced.calls import ReplacedCalls
from piper.capture.trace.replaced.caught_errors import refusing_swallowed
from piper.capture.trace.replaced.numbers import numbers_as_text, numbers_of_python
from piper.capture.trace.replaced.scripts import scripts_as_calls
from piper.capture.trace.replaced.texts import texts_only_printed
from piper.capture.trace.replaced.transformer_private import transformers_as_in_eager
from piper.capture.trace.replaced.types import types_of_eager
from piper.capture.unvalued_errors import explained
from piper.errors import CaptureError


@contextmanager
def tracing(
    model: nn.Module, view: nn.Module, mode: Any, precision: Precision | None
) -> Iterator[None]:
    """While this is open, the view can be traced, and the model must not change."""
    with ExitStack() as stack:
        stack.enter_context(only_this_thread())
        stack.enter_context(refusing_swallowed((CaptureError, *VALUE_WANTED)))
        stack.enter_context(errors_only_raised())
        stack.enter_context(functions.intercepted())
        stack.enter_context(observers_aside())
        stack.enter_context(forgetting())
        stack.enter_context(side_effects.unchanged(model))
        stack.enter_context(side_effects.no_python_randomness())
        stack.enter_context(refusing_seeds())
        stack.enter_context(refusing_hidden_contexts())
        stack.enter_context(tracing_private.unchecked_distributions())
        stack.enter_context(transformers_as_in_eager())
        stack.enter_context(numbers_as_text())
        stack.enter_context(numbers_of_python())
        stack.enter_context(scripts_as_calls())
        stack.enter_context(types_of_eager(model))
        stack.enter_context(texts_only_printed())
        stack.enter_context(recording())
        stack.enter_context(converting(view, precision))  # first, to end inside the tags
        stack.enter_context(tagging(view))
        stack.enter_context(mode)
        stack.enter_context(AsInEager())
        stack.enter_context(ReplacedCalls())
        yield


@contextmanager
def errors_only_raised() -> Iterator[None]:
    """torch logs an error of a tensor without values, with a traceback, before it raises it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def graph_of(forward: Callable, *args: list[Tensor]) -> fx.GraphModule:
    """The graph of a function. Errors of torch say which line of the model raised them."""
    try:
        root = tracing_private.trace_forward(forward, *args)
        side_effects.refuse_transforms(root.graph)
        side_effects.refuse_guessed_sizes(root.graph)
        return root
    except CaptureError:
        raise
    except Exception as error:
        if (known := explained(error)) is not None:
            raise known from error
        at = line_of(error.__traceback__)
        what = "the loss function" if is_in_loss(error.__traceback__) else "the model"
        error.add_note(f"{at}: raised while Piper traced {what} on tensors without values")
        raise
