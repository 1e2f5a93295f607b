"""Lists in a batch with an entry for each row, which microbatches cannot share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.batch.input_names import named_arguments

Lists = list[tuple[str, Sequence[Any]]]


def lists_of(model: torch.nn.Module, loss_fn: Any, batch: Batch) -> Lists:
    """Lists and tuples of numbers and texts in a batch, by name."""
    arguments = named_arguments(model, loss_fn if batch.labelled else None, batch)
    return [found for name, one in arguments for found in lists_in(name, one)]


def lists_in(path: str, given: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """
    >>> list(lists_in("x", {"a": [1, 2], "b": [torch.zeros(2), (3,)]}))
    [('x.a', [1, 2]), ('x.b.1', (3,))]
    """
    if isinstance(given, Mapping):
        for key, one in given.items():
            yield from lists_in(f"{path}.{key}", one)
    elif isinstance(given, tuple | list):
        if given and not any(has_rows(one) for one in given):
            yield path, given
        for key, one in enumerate(given):
            yield from lists_in(f"{path}.{key}", one)


def has_rows(one: Any) -> bool:
    return any(leaf.dim() for leaf in Batch.of((one,)).tensors)


def refuse_row_lists(lists: Lists, rows: int | None, whole: Sequence[str]) -> None:
    """A list stays as it is where tensors are cut, so that rows would get entries of others."""
    for name, one in lists:
        if len(one) == rows and name not in whole:
            what = f"{name} is a {type(one).__name__} of {rows}, as many as the batch has rows"
            fix = f'{tensors_for(name, one)}; if all rows share it, name it: whole=["{name}"]'
            raise InputError.of("batch", f"{what}, and it cannot be cut into microbatches", fix)


def tensors_for(name: str, entries: Sequence[Any]) -> str:
    if all(isinstance(one, bool | int | float) for one in entries):
        return f"give torch.tensor({name})"
    if all(isinstance(one, torch.Tensor) for one in entries):
        return f"give torch.stack({name})"
    return "give a tensor with a row for each: token ids of texts, say, padded to one length"
