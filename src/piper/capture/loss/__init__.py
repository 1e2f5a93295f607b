"""How a loss depends on the rows of its batch: a mean, a sum, or a mean over what is counted."""

from piper.capture.loss.coarse_loss import coarse_loss
from piper.capture.loss.counts import Count, counted, divisor, is_empty
from piper.capture.loss.form import (
    LossForm,
    form_from_json,
    form_to_json,
    function_form,
    model_form,
    own_form,
)
from piper.capture.loss.meeting_rows import meeting_rows
from piper.capture.loss.model_outputs import GrowingOutput, growing_outputs

__all__ = [
    "Count",
    "GrowingOutput",
    "LossForm",
    "coarse_loss",
    "counted",
    "is_empty",
    "divisor",
    "form_from_json",
    "form_to_json",
    "function_form",
    "growing_outputs",
    "meeting_rows",
    "model_form",
    "own_form",
]
