"""Names of the tensors of a batch, as a user would call them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from typing import Any

import torch

from piper.capture.trace.arguments.call_arguments import LABELS, Keywords
from piper.job.batch.batch import Batch

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def input_names(model: torch.nn.Module, loss_fn: Any, batch: Batch) -> list[str]:
    """The parameter of the model that gets each tensor; with its key or index, if it is nested.

    What the loss function gets is called `labels`.
    """
    arguments = named_arguments(model, loss_fn, batch)
    return [name for path, one in arguments for name in tensor_names(path, one)]


def named_arguments(
    model: torch.nn.Module, loss_fn: Any, batch: Batch
) -> Iterator[tuple[str, Any]]:
    given = list(batch.arguments)
    last = [(LABELS, given.pop())] if loss_fn is not None and given else []
    named = given.pop(0).items() if given and isinstance(given[0], Keywords) else ()
    taken = [one.name for one in signature(model.forward).parameters.values() if is_positional(one)]
    unnamed = (f"argument {k}" for k in range(len(taken), len(given)))
    by_position = zip([*taken[: len(given)], *unnamed], given, strict=True)
    return ((str(path), one) for path, one in (*named, *by_position, *last))


def tensor_names(path: str, given: Any) -> Iterator[str]:
    """
    >>> x = torch.zeros(1)
    >>> list(tensor_names("x", {"a": x, "b": [x, 1, x]})), list(tensor_names("x", 3))
    (['x.a', 'x.b.0', 'x.b.2'], [])
    """
    if isinstance(given, torch.Tensor):
        yield path
    elif isinstance(given, Mapping):
        for key, one in given.items():
            yield from tensor_names(f"{path}.{key}", one)
    elif isinstance(given, tuple | list):
        for key, one in enumerate(given):
            yield from tensor_names(f"{path}.{key}", one)
    else:
        leaves = [leaf for leaf in Batch.of((given,)).leaves if isinstance(leaf, torch.Tensor)]
        yield from (f"{path}.{k}" for k, _ in enumerate(leaves))


def is_positional(parameter: Parameter) -> bool:
    return parameter.kind in POSITIONAL
