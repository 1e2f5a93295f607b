"""Operators of Piper whose derivative is written by hand."""

from typing import Any

import torch

from piper.capture.autograd_private import apply_function

_library = torch.library.Library("piper", "FRAGMENT")


def differentiated(schema: str, function: type[torch.autograd.Function]) -> Any:
    """An operator that a trace keeps whole, and whose derivative calls other operators."""
    name = schema.partition("(")[0]

    def run(*args: Any) -> Any:
        return apply_function(function, *args)

    _library.define(schema)
    for key in ("Autograd", "CompositeExplicitAutograd"):
        _library.impl(name, run, key)
    return getattr(torch.ops.piper, name).default


def computed(schema: str, kernel: Any, without_values: Any) -> Any:
    """An operator without a derivative. `without_values` gives results of the right sizes."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, without_values, "Meta")
    return getattr(torch.ops.piper, name).default
