"""Whether a function takes the arguments that `piper.launch` is given, before a process starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

from piper.errors import InputError, call_form, did_you_mean, nearest
from piper.names import amount

BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def refuse_unfit(
    fn: Callable[..., Any], n: int, arguments: Sequence[Any], named: Mapping[str, Any]
) -> None:
    call = signature_of(fn)
    if call is None:
        return
    try:
        call.bind(*arguments, **named)
    except TypeError as error:
        form = call_form(call)
        what = f"{written(fn, form)} {why(call, error, arguments, named)}"
        fix = f"write {launch_of(fn, n, form)}"
        raise InputError.of("launch", what, fix) from None


def signature_of(fn: Callable[..., Any]) -> Signature | None:
    """Some functions of C have none."""
    try:
        return signature(fn)
    except (TypeError, ValueError):
        return None


def why(
    call: Signature, error: TypeError, arguments: Sequence[Any], named: Mapping[str, Any]
) -> str:
    places = [one for one in call.parameters.values() if one.kind in BY_POSITION]
    many = any(one.kind is Parameter.VAR_POSITIONAL for one in call.parameters.values())
    if len(arguments) > len(places) and not many:
        return f"takes {amount(len(places), 'argument')} by position, not {len(arguments)}"
    unknown = [name for name in named if name not in call.parameters]
    near = nearest(unknown[0], list(call.parameters)) if unknown else []
    return f"cannot be called like this: {error}{did_you_mean(near)}"


def written(fn: Callable[..., Any], form: Sequence[str]) -> str:
    """A function with its arguments, and its line: `train(steps), line 7 of nb.py,`."""
    code = getattr(fn, "__code__", None)
    line = f", line {code.co_firstlineno} of {Path(code.co_filename).name}," if code else ""
    return f"{name_of(fn)}({', '.join(form)}){line}"


def launch_of(fn: Callable[..., Any], n: int | str, form: Sequence[str] = ()) -> str:
    """
    >>> launch_of(signature_of, 2, ["fn"])
    'piper.launch(signature_of, 2, fn)'
    """
    return f"piper.launch({', '.join([name_of(fn), str(n), *form])})"


def name_of(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__name__", "")
    return name if name.isidentifier() else "fn"
