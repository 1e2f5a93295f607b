"""The types of parameters and modules under a `Precision`, while a model is traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture.precision import TYPES, Kept, Precision, refused
from piper.capture.torch_private import pytree
from piper.capture.trace.float8 import linear_layers, multiplying_in_float8


def parameter_types(model: nn.Module, precision: Precision | None) -> dict[str, torch.dtype]:
    """The type in which regions compute with each parameter, by its first name."""
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    if precision is None:
        return types
    kept = kept_modules(model, precision)
    inside = {id(p) for module in kept.values() for p in module.parameters()}
    refuse_shared(model, kept, inside)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            finer = id(parameter) in inside
            types[name] = TYPES[precision.master if finer else precision.compute]
    return types


def gradient_types(model: nn.Module, precision: Precision | None) -> dict[str, str]:
    """The type in which the gradient of each parameter is added up, by its first name.

    A parameter that several modules own has one sum, so it has the type of any that is named.
    """
    if precision is None:
        return {}
    types: dict[int, str] = {}
    for wanted, dtype in dict(precision.reduce_in).items():
        for module in named_modules(model, "reduce_in", [wanted]).values():
            types |= {id(parameter): dtype for parameter in module.parameters()}
    return {name: types.get(id(p), precision.reduce) for name, p in model.named_parameters()}


def kept_modules(model: nn.Module, precision: Precision) -> dict[str, nn.Module]:
    """The modules that compute in the type of the masters, by path."""
    return named_modules(model, "keep", precision.keep)


def named_modules(model: nn.Module, field: str, names: Sequence[Kept]) -> dict[str, nn.Module]:
    modules, found = dict(model.named_modules()), dict[str, nn.Module]()
    for wanted in names:
        matching = {path: one for path, one in modules.items() if matches(wanted, path, one)}
        if not matching:
            raise refused(
                f"{field}: the model has no module {shown(wanted)}", near(wanted, modules)
            )
        found |= matching
    return found


def refuse_shared(model: nn.Module, kept: Mapping[str, nn.Module], inside: set[int]) -> None:
    """A parameter has one type, so all modules that own it must be kept, or none."""
    for path, module in model.named_modules():
        if any(not one or path == one or path.startswith(f"{one}.") for one in kept):
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) in inside:
                raise refused(
                    f"keep: {name} is also a parameter of a module that is kept",
                    f"add {path!r} to keep, or keep neither",
                )


@contextmanager
def converting(model: nn.Module, precision: Precision | None) -> Iterator[None]:
    """While this is open, modules that are kept convert what they read and what they return.

    Linear layers that `fp8` names multiply in float8.
    """
    with ExitStack() as stack:
        if precision is not None:
            inner, outer = TYPES[precision.master], TYPES[precision.compute]
            kept = kept_modules(model, precision)
            for module in kept.values():
                stack.enter_context(_converting(module, inner, outer))
            named = named_modules(model, "fp8", precision.fp8)
            stack.enter_context(multiplying_in_float8(linear_layers(named, kept)))
        yield


@contextmanager
def _converting(module: nn.Module, inner: torch.dtype, outer: torch.dtype) -> Iterator[None]:
    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return in_type(args, inner), in_type(kwargs, inner)

    def leave(_: nn.Module, args: Any, result: Any) -> Any:
        return in_type(result, outer)

    before = module.register_forward_pre_hook(enter, with_kwargs=True)
    after = module.register_forward_hook(leave)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def in_type(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in this type, wherever they are in `values`."""

    def converted(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return pytree.tree_map(converted, values)


def matches(wanted: Kept, path: str, module: nn.Module) -> bool:
    if isinstance(wanted, str):
        return bool(path) and fnmatchcase(path, wanted)
    return isinstance(module, wanted)


def near(wanted: Kept, modules: Mapping[str, nn.Module]) -> str:
    known = [path for path in modules if path]
    if not isinstance(wanted, str):
        known = sorted({type(module).__name__ for module in modules.values()})
    close = get_close_matches(shown(wanted), known, n=3, cutoff=0.5) or known[:3]
    return f"use one of {', '.join(close)}"


def shown(wanted: Kept) -> str:
    return wanted if isinstance(wanted, str) else wanted.__name__
