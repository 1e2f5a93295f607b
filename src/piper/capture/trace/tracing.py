"""All that is open while a model is traced, or runs on tensors without values."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from piper.capture import torch_private
from piper.capture.marks.annotate import recording
from piper.capture.marks.tags import tagging
from piper.capture.precision import Precision
from piper.capture.python_state.function_caches import forgetting
from piper.capture.trace import functions, side_effects
from piper.capture.trace.conversions import converting
from piper.capture.trace.decisions.seeds import refusing_seeds
from piper.capture.trace.replaced.calls import ReplacedCalls


@contextmanager
def tracing(
    model: nn.Module, view: nn.Module, mode: Any, precision: Precision | None
) -> Iterator[None]:
    """While this is open, the view can be traced, and the model must not change."""
    with ExitStack() as stack:
        stack.enter_context(functions.intercepted())
        stack.enter_context(forgetting())
        stack.enter_context(side_effects.unchanged(model))
        stack.enter_context(side_effects.no_python_randomness())
        stack.enter_context(refusing_seeds())
        stack.enter_context(side_effects.no_inference_mode())
        stack.enter_context(torch_private.unchecked_distributions())
        stack.enter_context(recording())
        stack.enter_context(converting(view, precision))  # first, to end inside the tags
        stack.enter_context(tagging(view))
        stack.enter_context(mode)
        stack.enter_context(side_effects.AsInEager())
        stack.enter_context(ReplacedCalls())
        yield
