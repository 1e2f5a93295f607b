"""Tensors of different types that meet, and why they do under a precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from piper.capture.precision import TYPES, Precision
from piper.capture.source_lines import line_of
from piper.capture.torch_private import pytree
from piper.capture.trace.arguments.inputs import name_of
from piper.errors import CaptureError

SHOWN = 3  # buffers
CONVERT = "convert one where they meet, as in h.to(self.layer.weight.dtype)"
ABOUT_TYPES = ("dtype", "scalar type", "should be the same")  # in errors of torch


class MixedTypes(CaptureError):
    """A product of tensors of different types. What to write depends on the model and its batch."""

    types: tuple[torch.dtype, ...] = ()


def mixed_types(where: str, found: list[torch.dtype], operator: str = "") -> MixedTypes:
    what = f"{operator} of" if operator else "a product of"
    does = "takes" if operator else "multiplies"
    error = MixedTypes.of(
        where,
        f"{what} {' and '.join(map(name_of, found))}: torch {does} tensors of one type",
        CONVERT,
    )
    error.types = tuple(found)
    return error


def norm_types(where: str, dtype: torch.dtype, dims: int) -> CaptureError:
    """`dims`: of the batch, with rows and channels."""
    name, kind = name_of(dtype), f"torch.nn.BatchNorm{max(1, dims - 2)}d"
    return CaptureError.of(
        where,
        f"a batch norm has weights in {name} and statistics in another type, which torch does not "
        "run on a CPU",
        f'keep its types: precision=piper.Precision(compute="{name}", keep=[{kind}])',
    )


@contextmanager
def types_explained(
    model: nn.Module, precision: Precision | None, example: tuple[Any, ...]
) -> Iterator[None]:
    """Under a precision, neither the batch nor the model is to be converted by the user."""
    try:
        yield
    except MixedTypes as error:
        if precision is None:
            fix = fix_of_types(model, example, error.types)
            raise CaptureError.of(error.where, error.problems[0].what, fix) from None
        raise kept_type(error.where, model, precision) from None
    except RuntimeError as error:
        if precision is None or not any(text in str(error) for text in ABOUT_TYPES):
            raise
        raise kept_type(line_of(error.__traceback__), model, precision) from error


def fix_of_types(model: nn.Module, example: tuple[Any, ...], found: tuple[torch.dtype, ...]) -> str:
    """A batch of another type than the model is converted; other tensors are where they meet.

    >>> model, found = nn.Linear(2, 2).half(), (torch.float16, torch.float32)
    >>> print(fix_of_types(model, (torch.zeros(2),), found).replace(", or", "\\nor"))
    give batches in the type of the model, as in x.to(torch.float16)
    or write model.to(torch.float32)
    """
    own = {one.dtype for one in model.parameters() if one.is_floating_point()}
    leaves = pytree.tree_leaves(example)
    given = {one.dtype for one in leaves if isinstance(one, torch.Tensor)}
    others = [one for one in found if one in given - own]
    if len(own) != 1 or not others:
        return CONVERT
    wanted = f"give batches in the type of the model, as in x.to({own.pop()})"
    return f"{wanted}, or write model.to({others[0]})" if others[0].is_floating_point else wanted


def kept_type(where: str, model: nn.Module, precision: Precision) -> CaptureError:
    names = wide_buffers(model, TYPES[precision.compute])
    more = ["..."] * (len(names) > SHOWN)
    shown = f" ({', '.join([*names[:SHOWN], *more])})" if names else ""
    what = (
        f"{precision.compute} meets another type here: under this precision, parameters and "
        f"batches are {precision.compute}, but buffers{shown} and tensors that the forward makes "
        "keep their type, and so does what they are added to"
    )
    last = names[0].split(".")[-1] if names else "table"
    return CaptureError.of(
        where, what, f"convert them where they are used: self.{last}.to(x.dtype)"
    )


def wide_buffers(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Floating-point buffers of another type, but for those that torch's own modules have."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
        for name, one in module.named_buffers(recurse=False)
        if one.is_floating_point() and one.dim() and one.dtype != dtype
    ]
