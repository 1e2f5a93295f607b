"""What an error of capture means for a known kind of model, or for a batch of another form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from piper.errors import CaptureError, Problem, some_names
from piper.job.batch.batch import Batch, Shapes
from piper.job.batch.failed_calls import failures_explained
from piper.job.batch.input_names import input_names
from piper.job.loop.forward_prints import prints_shown_once


@dataclass
class FirstInputs:
    """What the first batch that was captured gives the model."""

    names: list[str] = field(default_factory=list)
    shapes: Shapes = ()  # of the whole batch

    @contextmanager
    def running(self, model: torch.nn.Module, loss_fn: Any, batch: Batch) -> Iterator[None]:
        """Around all that runs a model before a step: its prints, and errors of torch in it."""
        inputs_only = loss_fn is not None and not batch.labelled
        first = self.shapes[: len(batch.leaves)] if inputs_only else self.shapes
        with prints_shown_once(), failures_explained(model, loss_fn, batch, first):
            yield
        if batch.labelled:
            self.shapes = self.shapes or batch.shapes

    @contextmanager
    def explaining(self, model: torch.nn.Module, loss_fn: Any, one: Batch) -> Iterator[None]:
        try:
            yield
        except CaptureError as error:
            names = input_names(model, loss_fn, one)
            other = bool(self.names) and names != self.names
            raise (
                self.of_other_form(error, names) if other else about_experts(error, model)
            ) from None
        self.names = self.names or input_names(model, loss_fn, one)

    def of_other_form(self, error: CaptureError, names: list[str]) -> CaptureError:
        """`step(ids, labels)` may give the labels to another argument than the example does."""
        missing = [one for one in self.names if one not in names]
        more = [one for one in names if one not in self.names]
        said = [f"gives the model {some_names(more)}, which the example does not"] if more else []
        said += [f"has no {some_names(missing)}, as the example has"] if missing else []
        what = f"this batch {' and '.join(said) or 'has another order than the example'}"
        fix = "give batches in the form of the example, or by name: step(input_ids=..., labels=...)"
        form = Problem(what, fix)
        return CaptureError(error.where, form, *error.problems)


def about_experts(error: CaptureError, model: torch.nn.Module) -> CaptureError:
    """Experts as transformers runs them cannot be captured: say so, and what to write."""
    from piper.models.hugging_face import unadapted_experts  # registers operators, which takes time

    path = unadapted_experts(model)
    if path is None:
        return error
    what = f"the experts {path} are those of transformers, which cannot be captured"
    fix = "write piper.models.hugging_face.adapt_experts(model) before the Trainer"
    return CaptureError(error.where, Problem(what, fix), *error.problems)
