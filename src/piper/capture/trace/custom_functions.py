"""The user's autograd.Functions: each call is one operator of the trace.

A trace would see only what the forward computes, and differentiate that. As an operator it stays
whole until its region is differentiated. Then the user's forward and backward are traced.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from piper.capture import function_refusals as refusals
from piper.capture.autograd_private import apply_function
from piper.capture.torch_private import (
    FROM_ANOTHER_TRACE,
    VALUE_WANTED,
    OpOverload,
    TorchDispatchMode,
    pytree,
    storage_id,
    version_of,
)
from piper.capture.tracing_private import written_by
from piper.errors import CaptureError

Tensors = list[Tensor]
_library = torch.library.Library("piper", "FRAGMENT")
_numbers = count()
_known: dict[Any, "Call"] = {}  # equal calls are one operator, so that equal regions share code
_by_name: WeakValueDictionary[str, "Call"] = WeakValueDictionary()
_NAME = "function"  # of the operators, before a number
_TENSOR = object()  # in place of a tensor among the arguments


def called(function: type, args: tuple[Any, ...]) -> Any:
    """What the Function returns, as the result of one operator."""
    leaves, spec = pytree.tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        return apply_function(function, *args)
    fixed = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    call = _call(function, spec, fixed)
    found = iter(call.operator(tensors))
    leaves = [next(found) if leaf is _TENSOR else leaf for leaf in call.results]
    return pytree.tree_unflatten(leaves, call.result_spec)


def given_to(operator: OpOverload) -> list[tuple[str, Any]]:
    """What the code of a Function can reach, by name: itself, and its arguments but tensors."""
    call = _by_name.get(operator.name())
    if call is None:
        return []
    return [(call.original.__name__, call.original), ("arguments", list(call.fixed))]


def is_function(operator: Any) -> bool:
    """Whether it is a Function of the user."""
    if not isinstance(operator, OpOverload):
        return False
    name = operator.overloadpacket.__name__.removeprefix(_NAME)
    return operator.namespace == "piper" and name.isdigit()


def _call(function: type, spec: Any, fixed: tuple[Any, ...]) -> "Call":
    try:
        key = function, str(spec), tuple((type(leaf), leaf) for leaf in fixed)
        return _known.setdefault(key, _known.get(key) or Call(function, spec, fixed))
    except TypeError:  # an argument without a hash
        return Call(function, spec, fixed)


class Call:
    """A Function with all arguments but its tensors, as an operator of them."""

    def __init__(self, function: type, spec: Any, fixed: tuple[Any, ...]) -> None:
        self.original, self.function = function, _guarded(function)
        self.spec, self.fixed = spec, fixed
        self.results: list[Any] = []  # of the last run, with _TENSOR for each tensor
        self.result_spec: Any = None
        name = f"{_NAME}{next(_numbers)}"
        _library.define(f"{name}(Tensor[] given) -> Tensor[]")
        for key in ("Autograd", "CompositeExplicitAutograd"):
            _library.impl(name, self.run, key)
        self.operator = getattr(torch.ops.piper, name).default
        _by_name[self.operator.name()] = self

    def run(self, given: Sequence[Tensor]) -> Tensors:
        tensors = iter(given)
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.fixed]
        results = apply_function(self.function, *pytree.tree_unflatten(leaves, self.spec))
        found, self.result_spec = pytree.tree_flatten(results)
        self.results = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in found]
        return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _guarded(function: Any) -> type:
    """The same Function. What cannot be traced in it is an error with a fix."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        before = [version_of(tensor) for tensor in tensors]
        found = _traceable(function, "forward", args, kwargs)
        if [version_of(tensor) for tensor in tensors] != before:
            raise refusals.function_in_place(function.__name__)
        return found

    def backward(*args: Any) -> Any:
        with OwnWrites(function.__name__, args[1:]):
            return _traceable(function, "backward", args, {})

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(function.__name__, (function,), members)


class OwnWrites(TorchDispatchMode):
    """Refuses what writes to a tensor that a backward has neither made nor been given."""

    def __init__(self, name: str, gradients: Sequence[Any]) -> None:
        super().__init__()
        self.name, self.own = name, dict[int, Tensor]()  # by memory, which stays alive
        self.keep(gradients)

    def keep(self, found: Any) -> None:
        tensors = (one for one in pytree.tree_leaves(found) if isinstance(one, Tensor))
        self.own.update((storage_id(one), one) for one in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = written_by(func, args, kwargs or {})
        if any(storage_id(one) not in self.own for one in written):
            raise refusals.written_in_backward(self.name)
        given = {storage_id(one) for one in pytree.tree_leaves(args) if isinstance(one, Tensor)}
        found = func(*args, **(kwargs or {}))
        made = (one for one in pytree.tree_leaves(found) if isinstance(one, Tensor))
        self.keep([one for one in made if storage_id(one) not in given])
        return found


def _traceable(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    try:
        return getattr(function, name)(*args, **kwargs)
    except (CaptureError, *VALUE_WANTED):
        raise
    except Exception as error:
        if FROM_ANOTHER_TRACE in str(error):
            raise refusals.function_of_modules(function.__name__, name, error) from error
        raise refusals.custom_function(function.__name__, name, error) from error
