"""One batch where many are wanted, or many where one is: say what to write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from piper.capture.trace.arguments.call_arguments import split
from piper.errors import InputError
from piper.job.batch.batch import Batch

CALLS = {
    "evaluate": "trainer.evaluate({})",
    "rehearse": "piper.rehearse(model, loss_fn, strategy, {})",
}
SHOWN = 3  # types of the entries of a list
LOADER = "a DataLoader, or a list [(x, y), ...]"


def refuse_one_batch(where: str, given: Any, tensors_are_batches: bool) -> None:
    """It takes batches: rows of a tensor, or entries of a dict, are none."""
    call = CALLS[where]
    if isinstance(given, Dataset) and not isinstance(given, Iterable):
        fix = f"write {call.format('DataLoader(dataset, batch_size=...)')}"
        raise InputError.of(where, "it was given a data set, which has samples and no batches", fix)
    if is_batch(given, tensors_are_batches):
        form = "[(x, y)]" if isinstance(given, tuple | list) else "[batch]"
        fix = f"it takes a loader or a list of batches: write {call.format(form)}"
        raise InputError.of(where, f"it was given one batch, {kind_of(given)}", fix)
    if isinstance(given, str) or not can_be_iterated(given):
        raise InputError.of(where, f"its batches are {kind_of(given)}", f"give {LOADER}")


def is_batch(given: Any, tensors_are_batches: bool) -> bool:
    if isinstance(given, Mapping | torch.Tensor):
        return True
    inside = isinstance(given, tuple | list) and any(isinstance(x, torch.Tensor) for x in given)
    return inside and not tensors_are_batches


def refuse_many_batches(call: str, given: tuple[Any, ...], example: Batch) -> None:
    """`call` takes one batch. If the example has lists inside, so may this batch."""
    alone = given[0] if len(given) == 1 else ()
    if alone is None:
        raise InputError.of(call, "its batch is None", "give it what the example has")
    if isinstance(alone, DataLoader | Dataset | Iterator):
        raise one_at_a_time(call, kind_of(alone))
    if not isinstance(alone, tuple | list) or is_nested(example):
        return
    if is_numbered(alone):
        what = "it was given a number and a batch, as enumerate gives them"
        fix = f"write `for number, batch in enumerate(loader): trainer.{call}(batch)`"
        raise InputError.of(call, what, fix)
    if alone and all(isinstance(one, tuple | list) for one in alone) or are_dicts(alone):
        raise one_at_a_time(call, kind_of(alone))


def one_at_a_time(call: str, given: str) -> InputError:
    name = "inputs" if call == "predict" else "batch"  # without labels
    fix = f"write `for {name} in loader: trainer.{call}({name})`"
    return InputError.of(call, f"it takes one batch, and what it was given is {given}", fix)


def is_nested(batch: Batch) -> bool:
    given, _ = split(batch.arguments)
    return any(isinstance(one, tuple | list | Mapping) for one in given)


def is_numbered(given: tuple[Any, ...] | list[Any]) -> bool:
    """
    >>> is_numbered((0, [1, 2])), is_numbered((0, 1))
    (True, False)
    """
    pair = len(given) == 2 and type(given[0]) is int
    return pair and isinstance(given[1], tuple | list | Mapping)


def are_dicts(given: tuple[Any, ...] | list[Any]) -> bool:
    """One dict in a list is a batch: the list holds the arguments."""
    return len(given) > 1 and all(isinstance(one, Mapping) for one in given)


def can_be_iterated(given: Any) -> bool:
    return isinstance(given, Iterable) or hasattr(given, "__getitem__")


def kind_of(given: Any) -> str:
    """
    >>> kind_of(None), kind_of((1, [2])), kind_of({}), kind_of(torch.zeros(2, 3))
    ('None', 'the tuple (int, list)', 'a dict', 'a tensor of shape [2, 3]')
    """
    match given:
        case None:
            return "None"
        case torch.Tensor():
            return f"a tensor of shape {list(given.shape)}"
        case tuple() | list():
            return f"the {type(given).__name__} {entries_of(given)}"
        case Mapping():
            return "a dict"
        case Iterator():
            return "an iterator"
        case _:
            return f"of type {type(given).__name__}"


def entries_of(given: tuple[Any, ...] | list[Any]) -> str:
    """
    >>> entries_of([1, 2]), entries_of((1, 2.0, "", ""))
    ('[int, int]', '(int, float, str, ...)')
    """
    names = [type(one).__name__ for one in given[:SHOWN]]
    inside = ", ".join([*names, *["..."] * (len(given) > SHOWN)])
    return f"[{inside}]" if isinstance(given, list) else f"({inside})"
