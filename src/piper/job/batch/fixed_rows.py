"""Models that run with the rows of a whole batch only, as `x.view(8, -1)` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from piper.capture.precision import Precision
from piper.capture.trace.arguments.inputs import inputs_of
from piper.capture.trace.arguments.outputs import joined
from piper.errors import InputError, PiperError, first_line, some_names
from piper.job.batch.batch import Batch
from piper.job.batch.input_names import input_names
from piper.job.batch.other_sizes import OtherSizes

FIX = (
    "write sizes that follow the input: x.shape[0] in place of a number, torch.zeros(len(x), ...) "
    "in place of a tensor with a row for each; if rows are pairs or groups, let microbatches have "
    "whole ones: another number of microbatches, or microbatch_sizes=[...]"
)


@dataclass(frozen=True, slots=True)
class FixedRows:
    model: torch.nn.Module
    loss_fn: Any
    device: str
    precision: Precision | None

    @contextmanager
    def refused(self, whole: Batch, part: Batch) -> Iterator[None]:
        """Say what an error means if a model runs with a batch, but not with a part of it."""
        try:
            yield
        except PiperError:
            raise
        except Exception as error:
            rows = part.rows
            if rows == whole.rows or self.runs_with(part) or not self.runs_with(whole):
                raise
            what = f"the model or its loss runs with the {whole.rows} rows of the batch, but not "
            why = f"{type(error).__name__}: {first_line(error)}"
            what += f"with the {rows} of a microbatch: {why}"
            raise InputError.of("batch", what, f"{FIX}{self.other_rows(whole)}") from error

    def other_rows(self, whole: Batch) -> str:
        """Inputs that are cut may be the wrong ones, if others are not: time may come first."""
        if not whole.whole:
            return ""
        names = input_names(self.model, self.loss_fn if whole.labelled else None, whole)
        cut = some_names([name for k, name in enumerate(names) if k not in whole.whole])
        kept = some_names([names[k] for k in sorted(whole.whole)])
        return (
            f". If these are not the rows ({cut} cut, {kept} not), give batches with "
            "rows first, and name what all rows share: whole=[...]"
        )

    def runs_with(self, batch: Batch) -> bool:
        loss_fn, arguments = self.loss_fn, batch.arguments
        if not batch.labelled:
            loss_fn, arguments = joined, (*arguments, None)
        sizes = OtherSizes(self.model, loss_fn, inputs_of(arguments), self.device, self.precision)
        return sizes.runs(sizes.known)
