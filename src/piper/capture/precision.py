"""Mixed precision: the types in which a model computes, is updated, and adds up gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from piper.errors import InputError

TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
SHORT = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
FIX = 'write precision="bf16", or piper.Precision(compute="bfloat16")'
Kept = str | type[nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The types of a training step. docs/precision.md explains each.

    `keep` are modules that compute in the type of the masters: paths, with `*` for anything
    ("layers.*.norm"), or classes (torch.nn.LayerNorm).
    """

    compute: str = "bfloat16"  # of parameters, activations, and messages that carry them
    master: str = "float32"  # of the parameters that the optimizer updates
    reduce: str = "float32"  # in which gradients are added over microbatches and replicas
    output: str = "float32"  # of the model's output, which loss_fn reads
    keep: tuple[Kept, ...] = ()

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name != "keep":
                object.__setattr__(self, one.name, type_name(one.name, getattr(self, one.name)))
        object.__setattr__(self, "keep", modules_to_keep(self.keep))
        if eps(self.master) > eps(self.compute):
            raise refused(
                f"masters in {self.master} are coarser than the parameters in {self.compute}",
                f'write Precision(compute="{self.master}", master="{self.compute}")',
            )


def precision_of(given: Any) -> Precision | None:
    """What the user wrote: nothing, "bf16", or a Precision."""
    if given is None or isinstance(given, Precision):
        return given
    if isinstance(given, str) and given in ("bf16", "bfloat16"):
        return Precision()
    if given in ("fp16", "float16", "half", torch.float16):
        raise half()
    raise refused(f"{given!r} is not a precision", FIX)


def type_name(field: str, given: Any) -> str:
    """
    >>> type_name("compute", torch.bfloat16), type_name("master", "fp32")
    ('bfloat16', 'float32')
    """
    name = str(given).removeprefix("torch.")
    name = SHORT.get(name, name)
    if name in ("float16", "fp16", "half"):
        raise half()
    if name not in TYPES:
        close = get_close_matches(name, [*TYPES, *SHORT], 1)
        fix = f'write {field}="{close[0]}"' if close else f"use one of {', '.join(TYPES)}"
        raise refused(f"{field}={given!r} is not a type that Piper can train in", fix)
    return name


def modules_to_keep(given: Any) -> tuple[Kept, ...]:
    listed = given if isinstance(given, list | tuple) else (given,)
    for one in listed:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise refused(
                f"keep has {one!r}, which is neither a path nor a class of modules",
                'write keep=["layers.*.norm", torch.nn.LayerNorm]',
            )
    return tuple(listed)


def eps(name: str) -> float:
    return float(torch.finfo(TYPES[name]).eps)


def half() -> InputError:
    return refused("float16 needs a loss scale, which Piper does not have", 'use precision="bf16"')


def refused(what: str, fix: str) -> InputError:
    return InputError.of("precision", what, fix)
