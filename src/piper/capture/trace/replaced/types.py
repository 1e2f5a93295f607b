"""`type(x)` and `x.__class__` are what they are in eager training, to the user's code."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import GenericAlias
from typing import Any

from torch import Tensor, nn

from piper.capture.python_state.function_caches import own_modules
from piper.capture.source_lines import is_users
from piper.capture.torch_private import TRACED, is_real
from piper.capture.trace.replaced.numbers import NUMBERS


@contextmanager
def types_of_eager(model: nn.Module) -> Iterator[None]:
    """While this is open, `type` is another one in the modules with the user's code."""
    scopes = [one for one in _scopes(model) if "type" not in one]
    for scope in scopes:
        scope["type"] = Type
    try:
        with ExitStack() as stack:
            for kind in (*TRACED, *NUMBERS):
                stack.enter_context(_class_of_eager(kind))
            yield
    finally:
        for scope in scopes:
            scope.pop("type", None)


@contextmanager
def _class_of_eager(kind: Any) -> Iterator[None]:
    """Python gives no other way to answer for an attribute that every class has."""
    plain = kind.__getattribute__

    def asked(tensor: Any, name: str) -> Any:
        if name == "__class__" and is_users(sys._getframe(1).f_code.co_filename):
            return type_of(tensor)
        return plain(tensor, name)

    if "__getattribute__" in vars(kind):  # a trace inside of another
        yield
        return
    kind.__getattribute__ = asked
    try:
        yield
    finally:
        del kind.__getattribute__


def _scopes(model: nn.Module) -> list[dict[str, Any]]:
    """The globals of the user's own modules, and of libraries with classes of the model."""
    classes = {base for one in model.modules() for base in type(one).__mro__}
    names = {one.__module__ for one in classes} | {"__main__"}
    named = [sys.modules[name] for name in names if name in sys.modules]
    libraries = [one for one in named if is_users(getattr(one, "__file__", None) or "")]
    return [vars(one) for one in (*own_modules(), *libraries)]


class _Asked(type):
    """A class of which all else is as of `type`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return type_of(*args) if len(args) == 1 else type(*args, **kwargs)

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, type)

    def __subclasscheck__(cls, one: Any) -> bool:
        return issubclass(one, type)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is type

    def __hash__(cls) -> int:
        return hash(type)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type, name)


class Type(metaclass=_Asked):
    __class_getitem__: Any = classmethod(GenericAlias)


def type_of(one: Any) -> type:
    """
    >>> type_of(1), type_of(nn.Parameter(Tensor())).__name__
    (<class 'int'>, 'Parameter')
    """
    found = type(one)
    if issubclass(found, Tensor) and not is_real(one):
        return nn.Parameter if isinstance(one, nn.Parameter) else Tensor
    return NUMBERS.get(found, found)
