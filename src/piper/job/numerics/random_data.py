"""Random batches like the example, on which the model runs."""

from __future__ import annotations

import copy

import torch

from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.batch.random_batches import like, like_columns, microbatches, rows_of
from piper.job.job import Job
from piper.job.numerics.reference import loss_of, sizes_of


def random_data(
    model: torch.nn.Module, job: Job, example: Batch, steps: int, seed: int
) -> list[Batch]:
    """A batch for each step. A model may not take any integer where it takes some: a column of a
    table may have fewer categories than another. Then the data is nearer to the example."""
    rows, error = job.rows.everywhere(example.rows or 0, 0), ""
    for draw in (like, like_columns, rows_of):
        generator = torch.Generator().manual_seed(seed)
        batches = [draw(example, rows, generator) for _ in range(steps)]
        found = failure(model, job, batches)
        if not found:
            return batches
        error = error or found
    raise InputError.of(
        "example",
        f"the model does not run on the CPU on data like it, nor on its own rows: {error}",
        "make an example that the model runs on, or a model that runs on the CPU",
    )


def failure(model: torch.nn.Module, job: Job, batches: list[Batch]) -> str:
    """What the model raises on any of the microbatches. Empty: nothing."""
    own = copy.deepcopy(model)
    try:
        with torch.no_grad():
            for batch in batches:
                for piece in microbatches(batch, job.all_microbatches, sizes_of(job, batch)):
                    loss_of(own, job, piece)
    except Exception as error:  # whatever it is
        return f"{type(error).__name__} {str(error).partition(chr(10))[0]}".rstrip()
    return ""
