"""How a loss depends on the rows of its batch: a mean, a sum, or a mean over what is counted."""

from piper.capture.loss.counts import Count, counted, divisor
from piper.capture.loss.form import (
    LossForm,
    form_from_json,
    form_to_json,
    function_form,
    model_form,
)

__all__ = [
    "Count",
    "LossForm",
    "counted",
    "divisor",
    "form_from_json",
    "form_to_json",
    "function_form",
    "model_form",
]
