"""Batches as loaders give them: tuples, lists, dicts, or keyword arguments of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

import torch

from piper.capture.trace.arguments.call_arguments import LABELS, Keywords
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.batch.call_signatures import fits, refuse_wrong_calls
from piper.job.batch.foreign_values import refuse_foreign_values
from piper.job.batch.one_or_many import kind_of, refuse_many_batches, refuse_one_batch

Arguments = tuple[Any, ...]
BY_POSITION = "write step(inputs, labels)"
PAIR = "give (x, y)"


def example_of(model: torch.nn.Module, loss_fn: Any, example: Any, where: str = "example") -> Batch:
    """One batch, as a loader gives it. A tuple or list holds the arguments of a step."""
    if not isinstance(example, tuple | list | Mapping | torch.Tensor):
        fix = "give a batch: a tuple (x, y), or a dict of what the model takes"
        more = ", such as next(iter(loader))" if isinstance(example, Iterable) else ""
        raise InputError.of(where, f"it is {kind_of(example)}", fix + more)
    given = tuple(example) if isinstance(example, tuple | list) else (example,)
    if not given:
        raise InputError.of(where, "it is empty", "give it what the model takes: (x, y)")
    if loss_fn is not None and len(given) == 1 and isinstance(given[0], torch.Tensor):
        refuse_label_only(model, where)
    found = arguments_of(model, loss_fn, given, {})
    refuse_wrong_calls(model, loss_fn, found, where, None)
    batch = dense(Batch.of(found), where)
    refuse_foreign_values(model, loss_fn, batch, where)
    return batch


def refuse_label_only(model: torch.nn.Module, where: str) -> None:
    if not takes(model, (), {}):
        what = "it is one tensor: with a loss_fn that is the label, and the model gets nothing"
        raise InputError.of(where, what, "write example=(x, y)" if where == "example" else PAIR)


def refuse_no_batches(
    where: str, given: Any, model: torch.nn.Module, loss_fn: Any, example: Batch | None
) -> None:
    """`evaluate` and `rehearse` take batches, and not one."""
    one_tensor = example is None or len(example.tensors) < 2
    alone = one_tensor if loss_fn is None else takes(model, (), {})
    refuse_one_batch(where, given, alone)


def batch_of(
    model: torch.nn.Module, loss_fn: Any, example: Batch, given: Arguments, named: dict[str, Any]
) -> Batch:
    """The batch of a step: its arguments, or all of them in one tuple, list or dict."""
    wanted = example.arguments
    refuse_many_batches("step", given, example)
    if not named and not any(holds(one) for one in given):
        raise InputError.of("step", "it was given nothing", "give it what the example has")
    if len(given) == 1 and not named and isinstance(given[0], tuple | list):
        takes_list = len(wanted) == 1 and isinstance(wanted[0], tuple | list)
        given = given if takes_list else tuple(given[0])
    found = arguments_of(model, loss_fn, given, named)
    refuse_wrong_calls(model, loss_fn, found, "batch", len(wanted))
    batch = dense(Batch.of(in_order(found, wanted)), "batch", has_values=True)
    refuse_foreign_values(model, loss_fn, batch, "batch")
    return batch


def inputs_of(
    model: torch.nn.Module, loss_fn: Any, example: Batch, given: Arguments, named: dict[str, Any]
) -> Batch:
    """What a model is called with, without labels for a loss function."""
    refuse_many_batches("predict", given, example)
    inside = given[0] if len(given) == 1 and not named else None
    if isinstance(inside, list | tuple):
        wanted = example.arguments if loss_fn is None else example.arguments[:-1]
        given = given if is_one_list(inside, wanted) else tuple(inside)
    found = arguments_of(model, None, given, named)
    refuse_labels(model, found)
    batch = dense(replace(Batch.of(found), labelled=False), "batch", has_values=True)
    refuse_foreign_values(model, None, batch, "batch")
    return batch


def is_one_list(given: list[Any] | tuple[Any, ...], wanted: Arguments) -> bool:
    """Whether a list is the only input of the model, and not what holds its inputs."""
    if len(wanted) != 1 or not isinstance(wanted[0], list | tuple):
        return False
    held = len(given) == 1 and isinstance(given[0], list | tuple)
    return not held or any(isinstance(one, list | tuple) for one in wanted[0])


def dense(batch: Batch, where: str, has_values: bool = False) -> Batch:
    """The batch, whose tensors can be cut into rows; an example needs no values."""
    for tensor in batch.tensors:
        if tensor.is_nested:
            what = "a tensor is nested, and has rows of different sizes"
            fix = "give tensor.to_padded_tensor(0.0), and the lengths of rows or a mask beside it"
            raise InputError.of(where, what, fix)
        if tensor.layout is not torch.strided:
            what = f"a tensor of {list(tensor.shape)} is sparse ({tensor.layout})"
            fix = "give tensor.to_dense(), or indices and values from which the model makes it"
            raise InputError.of(where, what, fix)
        if has_values and tensor.is_meta:
            what = f"a tensor of {list(tensor.shape)} is on meta, where it has no values"
            raise InputError.of(where, what, "give the batch itself; only example= may be on meta")
    return batch


def refuse_labels(model: torch.nn.Module, arguments: Arguments) -> None:
    """A dict as `step` takes it, of a model that takes its entries but for the labels."""
    one = arguments[0] if len(arguments) == 1 else None
    if not isinstance(one, Mapping) or LABELS not in one or takes(model, (), one):
        return
    if takes(model, (), {name: value for name, value in one.items() if name != LABELS}):
        what = f"the model does not take the entry {LABELS!r}"
        raise InputError.of("predict", what, "leave out the labels")


def holds(one: Any) -> bool:
    """Whether there is anything in it."""
    return not isinstance(one, tuple | list | Mapping) or len(one) > 0


def arguments_of(
    model: torch.nn.Module, loss_fn: Any, given: Arguments, named: Mapping[str, Any]
) -> Arguments:
    """Keywords first, if there are any, and labels last, if there is a loss function.

    A dict that is the model's only argument becomes keywords, if the model has parameters of these
    names.
    """
    if loss_fn is None:
        return with_keywords(model, given, named)
    inside = given[0] if len(given) == 1 and not named else None
    if isinstance(inside, Mapping):
        given, named = (), inside
    if LABELS in named:
        rest = {name: one for name, one in named.items() if name != LABELS}
        return (Keywords(rest, labelled=True), *given, named[LABELS])
    if not given:
        names = ", ".join(map(str, named)) or "nothing"
        what = f"loss_fn needs an entry {LABELS!r}, and the batch has {names}"
        raise InputError.of("batch", what, f"rename the entry, or {BY_POSITION}")
    return (*with_keywords(model, given[:-1], named), given[-1])


def with_keywords(model: torch.nn.Module, given: Arguments, named: Mapping[str, Any]) -> Arguments:
    if named:
        return (Keywords(named), *given)
    if len(given) == 1 and isinstance(given[0], Mapping) and takes(model, (), given[0]):
        return (Keywords(given[0]),)
    return given


def takes(model: torch.nn.Module, given: Arguments, named: Mapping[Any, Any]) -> bool:
    """Whether the model can be called like this."""
    if not all(isinstance(name, str) for name in named):
        return False
    try:
        return fits(signature(model.forward), given, named)
    except (TypeError, ValueError):
        return False


def in_order(found: Arguments, wanted: Arguments) -> Arguments:
    """Keywords in the order of the example: another order is no reason to compile again."""
    first, like = found[:1], wanted[:1]
    if not (is_keywords(first) and is_keywords(like) and set(first[0]) == set(like[0])):
        return found
    ordered = {name: first[0][name] for name in like[0]}
    return (Keywords(ordered, first[0].labelled), *found[1:])


def is_keywords(arguments: Arguments) -> bool:
    return bool(arguments) and isinstance(arguments[0], Keywords)
