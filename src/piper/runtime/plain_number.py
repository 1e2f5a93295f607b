"""Numbers of Python where people expect a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from piper.errors import InputError, NoAttribute

NO_BACKWARD = "leave it out: a step of the Trainer includes the backward and the optimizer's step"
METHODS = frozenset({
    "item", "detach", "cpu", "cuda", "to", "float", "double", "clone", "mean", "sum", "numpy",
    "tolist",
})  # fmt: skip
ATTRIBUTES = frozenset({"data", "requires_grad", "grad", "grad_fn", "device", "dtype", "shape"})


class NoNumber:
    """What a step returns, where people expect its loss."""

    def __float__(self) -> float:
        raise InputError.of("metrics", "a step returns several numbers", "write .loss")

    def __add__(self, other: object) -> float:
        return float(self)

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __add__

    def __format__(self, form: str) -> str:
        return format(float(self), form) if form else str(self)


class PlainNumber(float):
    """A loss, say. What a tensor has, and a number has not, is an error that says what to write.

    >>> PlainNumber(2.5), isinstance(PlainNumber(2.5), float)
    (2.5, True)
    >>> PlainNumber(2.5).item()
    Traceback (most recent call last):
        ...
    piper.errors.NoAttribute: the loss: it has no item
      fix: leave out .item(): it is a number of Python already
    """

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "backward":
                raise NoAttribute.of("the loss", "it has no backward", NO_BACKWARD)
            if name in METHODS | ATTRIBUTES:
                call = "()" if name in METHODS else ""
                fix = f"leave out .{name}{call}: it is a number of Python already"
                raise NoAttribute.of("the loss", f"it has no {name}", fix)
            text = f"'float' object has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=float(self))
