"""What a step returns, where people expect a number or a tensor."""

from __future__ import annotations

from piper.errors import InputError

NO_BACKWARD = "leave it out: a step of the Trainer includes the backward and the optimizer's step"


class NoNumber:
    """Arithmetic with it is an error that says what to write."""

    def __float__(self) -> float:
        raise InputError.of("metrics", "a step returns several numbers", "write .loss")

    def __add__(self, other: object) -> float:
        return float(self)

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __add__

    def __format__(self, form: str) -> str:
        return format(float(self), form) if form else str(self)
