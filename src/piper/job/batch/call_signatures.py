"""Whether the model and the loss can be called with a batch. If not, say how they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Signature, signature
from typing import Any

import torch

from piper.capture.trace.arguments.call_arguments import split
from piper.errors import InputError, nearest
from piper.names import amount
from piper.runtime.torch_private import has_input_hooks

Arguments = tuple[Any, ...]
LIST = "a tuple or list holds the arguments of a step"
TAKEN = "give those that the model takes"
LOSS = "give a loss_fn, which gets the last of them: Trainer(model, loss_fn, ...)"
SEVERAL = "several labels are one tuple, (x, (y, z))"


def refuse_wrong_calls(
    model: torch.nn.Module, loss_fn: Any, arguments: Arguments, where: str, wanted: int | None
) -> None:
    """`arguments`: the last is for the loss function, if there is one. `wanted`: so many are in the
    example, if this is not it."""
    if loss_fn is not None and not fits(shape_of(loss_fn), (None, None), {}):
        raise wrong_loss(loss_fn)
    inputs = split(arguments if loss_fn is None else arguments[:-1])
    if fits(shape_of(model), *inputs):
        return
    what = f"{call_of(model)} cannot be called with {described(*inputs)}"
    last = "labels are" if entries(*inputs) else "the last argument is"
    what += f"; {last} for loss_fn" if loss_fn is not None else ""
    if wanted is not None and wanted != len(arguments):
        count = f"step was given {amount(len(arguments), 'argument')}, but the example has {wanted}"
        raise InputError.of(where, f"{count}: {what}", "give step what the example has")
    raise InputError.of(where, what, fix(shape_of(model), loss_fn, arguments, *inputs))


def fix(
    shape: Signature | None, loss_fn: Any, arguments: Arguments, given: Arguments, named: Any
) -> str:
    """What to write, by what the model would take."""
    if names := entries(given, named):
        known = shape.parameters if shape else {}
        if (kept := [one for one in names if one in known]) and fits(
            shape, (), dict.fromkeys(kept)
        ):
            unknown = ", ".join(one for one in names if one not in known)
            return f"leave out {unknown}, which the model does not take"
        return "name entries as the model does, or give them by position"
    if len(given) == 1 and isinstance(given[0], tuple | list) and fits(shape, tuple(given[0]), {}):
        last = "" if loss_fn is None else ", y"
        return f"the inputs are in a {type(given[0]).__name__} of their own: write (*inputs{last})"
    if loss_fn is None:
        listed = len(given) > 1 and fits(shape, (given,), {})
        taken = "write ([a, b],) if it takes one list" if listed else TAKEN
        has_labels = len(arguments) > 1 and fits(shape, *split(arguments[:-1]))
        return (
            f"{LOSS}; or, for a model with a loss of its own, {taken}"
            if has_labels
            else (f"{LIST}: {taken}")
        )
    if len(arguments) == 1 and isinstance(arguments[0], tuple | list):
        return f"{LIST}: write (x, y), or ([a, b], y) for a model that takes a list"
    if fits(shape, *split(arguments)):
        return "add the labels; or leave out loss_fn (None) if the model has its own loss"
    more = "; ([a, b], y) for a model that takes a list" if fits(shape, (given,), {}) else ""
    return f"write (x, y): what the model takes, and then the labels{more}; {SEVERAL}"


def wrong_loss(loss_fn: Any) -> InputError:
    what = f"{call_of(loss_fn)} cannot be called with the output of the model and the labels"
    return InputError.of("loss_fn", what, f"write loss_fn(output, labels); {SEVERAL}")


def misspelt(model: torch.nn.Module, arguments: Arguments) -> tuple[str, str] | None:
    """An entry of a batch that only `**kwargs` of the model takes, and a parameter that is missing
    and has nearly its name."""
    shape, names = shape_of(model), entries(*split(arguments))
    missing = [one for one in shape.parameters if one not in names] if shape else []
    for name in names:
        near = nearest(name, missing) if shape and name not in shape.parameters else []
        if near:
            return name, near[0]
    return None


def described(given: Arguments, named: Mapping[str, Any]) -> str:
    return ", ".join(map(str, entries(given, named))) or amount(len(given), "input")


def entries(given: Arguments, named: Mapping[str, Any]) -> list[str]:
    """The names in a batch that is a dict, or has keywords."""
    alone = given[0] if len(given) == 1 and isinstance(given[0], Mapping) else {}
    return [*named, *alone]


def shape_of(function: Any) -> Signature | None:
    """None: not known. Hooks may change what a model is called with."""
    if isinstance(function, torch.nn.Module):
        own = type(function).__call__ is not torch.nn.Module.__call__
        if own or has_input_hooks(function):
            return None
        function = function.forward
    try:
        return signature(function)
    except (TypeError, ValueError):
        return None


def fits(shape: Signature | None, given: Arguments, named: Mapping[str, Any]) -> bool:
    if shape is None:
        return True
    try:
        shape.bind(*given, **named)
    except TypeError:
        return False
    return True


def call_of(function: Callable[..., Any]) -> str:
    """
    >>> call_of(torch.nn.Linear(2, 2))
    'Linear.forward(input)'
    """
    name = getattr(function, "__name__", None) or f"{type(function).__name__}"
    name = f"{name}.forward" if isinstance(function, torch.nn.Module) else name
    shape = shape_of(function)
    return f"{name}({', '.join(map(parameter, shape.parameters.values())) if shape else '...'})"


def parameter(one: Any) -> str:
    """Its name, without types."""
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    return f"{stars}{one.name}{'=...' if one.default is not one.empty else ''}"
