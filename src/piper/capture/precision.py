"""Mixed precision: the types in which a model computes, is updated, and adds up gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import torch
from torch import nn

from piper.errors import InputError, saying_options

TYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
    "float64": torch.float64,
}  # fmt: skip
SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64",
}  # fmt: skip
FIX = 'write precision="bf16" or "fp16", or piper.Precision(compute="bfloat16")'
PLAIN = FIX + ", or leave precision= out to compute in the type of the model"
Kept: TypeAlias = str | type[nn.Module]
TypeOf = Mapping[Kept, str] | tuple[tuple[Kept, str], ...]
KEEP = 'keep=["layers.*.norm", torch.nn.LayerNorm]'
FP8 = 'fp8=["layers.*.mlp", torch.nn.Linear]'
REDUCE_IN = 'reduce_in={"layers.*.norm": "float32", torch.nn.Embedding: "bfloat16"}'


@saying_options
@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """How the loss scale of float16 changes, in the words of `torch.amp.GradScaler`.

    A step whose gradients overflow changes no parameter, and multiplies the scale by `backoff`.
    After `interval` steps without overflow, it is multiplied by `growth`.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        numbers = {"init": self.init, "growth": self.growth, "backoff": self.backoff}
        for name, value in numbers.items():
            fine = isinstance(value, int | float) and not isinstance(value, bool)
            if not fine or not 0 < value < float("inf"):
                raise refused(f"{name}={value!r} of the loss scale", "write a number above 0")
        if self.growth < 1 or self.backoff > 1:
            raise refused(
                f"a loss scale that grows by {self.growth} and backs off by {self.backoff}",
                "write growth=2.0, backoff=0.5",
            )
        if type(self.interval) is not int or self.interval < 1:
            raise refused(f"interval={self.interval!r} of the loss scale", "write steps, 1 or more")


@saying_options
@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The types of a training step. docs/precision.md explains each.

    `keep` are modules that compute in the type of the masters: paths, with `*` for anything
    ("layers.*.norm"), or classes (torch.nn.LayerNorm). `fp8` are modules, by the same names, whose
    linear layers multiply in float8. `reduce_in` gives some modules another type than `reduce`.
    """

    compute: str = "bfloat16"  # of parameters, activations, and messages that carry them
    master: str = "float32"  # of the parameters that the optimizer updates
    reduce: str = "float32"  # in which gradients are added over microbatches and replicas
    reduce_in: TypeOf = ()  # the same for the parameters of some modules; the last one counts
    output: str = "float32"  # of the model's output, which loss_fn reads
    keep: tuple[Kept, ...] = ()
    fp8: tuple[Kept, ...] = ()  # experimental
    loss_scale: LossScale | None = None  # None: as `LossScale()` for float16, else none

    def __post_init__(self) -> None:
        for name in ("compute", "master", "reduce", "output"):
            object.__setattr__(self, name, type_name(name, getattr(self, name)))
        if not isinstance(self.loss_scale, LossScale | None):
            what = f"loss_scale={self.loss_scale!r} is not a LossScale"
            raise refused(what, "write loss_scale=piper.LossScale(init=2.0**16)")
        if self.compute == "float16" and self.loss_scale is None:
            object.__setattr__(self, "loss_scale", LossScale())
        for name, example in (("keep", KEEP), ("fp8", FP8)):
            object.__setattr__(self, name, names_of_modules(name, getattr(self, name), example))
        object.__setattr__(self, "reduce_in", types_of_modules(self.reduce_in))
        if self.fp8 and self.compute != "bfloat16":
            raise refused(
                f"fp8 with compute={self.compute!r}: products in float8 give bfloat16",
                'write compute="bfloat16"',
            )
        if self.master == "float16":
            raise refused("masters in float16 would lose small updates", 'write master="float32"')
        if eps(self.master) > eps(self.compute):
            raise refused(
                f"masters in {self.master} are coarser than the parameters in {self.compute}",
                f'write Precision(compute="{self.master}", master="{self.compute}")',
            )


def precision_of(given: Any) -> Precision | None:
    """What the user wrote: nothing, "bf16", "fp16", or a Precision."""
    if given is None or isinstance(given, Precision):
        return given
    if isinstance(given, str) and SHORT.get(given, given) in ("bfloat16", "float16"):
        return Precision(compute=given)
    raise refused(f"{given!r} is not a precision", PLAIN)


def type_name(field: str, given: Any) -> str:
    """
    >>> type_name("compute", torch.bfloat16), type_name("master", "fp32")
    ('bfloat16', 'float32')
    """
    name = str(given).removeprefix("torch.")
    name = SHORT.get(name, name)
    if name not in TYPES:
        close = get_close_matches(name, [*TYPES, *SHORT], 1)
        fix = f'write {field}="{close[0]}"' if close else f"use one of {', '.join(TYPES)}"
        raise refused(f"{field}={given!r} is not a type that Piper can train in", fix)
    return name


def names_of_modules(field: str, given: Any, example: str) -> tuple[Kept, ...]:
    listed = given if isinstance(given, list | tuple) else (given,)
    for one in listed:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise refused(
                f"{field} has {one!r}, which is neither a path nor a class of modules",
                f"write {example}",
            )
    return tuple(listed)


def types_of_modules(given: Any) -> tuple[tuple[Kept, str], ...]:
    """
    >>> types_of_modules({"norm": torch.float32})
    (('norm', 'float32'),)
    """
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple) or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        what = f"reduce_in={given!r} gives no types to modules"
        raise refused(what, f"write {REDUCE_IN}")
    names = names_of_modules("reduce_in", [name for name, _ in pairs], REDUCE_IN)
    return tuple((n, type_name("reduce_in", t)) for n, (_, t) in zip(names, pairs, strict=True))


def eps(name: str) -> float:
    return float(torch.finfo(TYPES[name]).eps)


def refused(what: str, fix: str) -> InputError:
    return InputError.of("precision", what, fix)
