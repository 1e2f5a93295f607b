"""A function of torch.jit.script is one call to whoever watches calls, as one of torch is.

TorchScript calls operators from C++. Those without values then call others in Python, but only the
first time: later they know the sizes of the results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch.jit import ScriptFunction
from torch.overrides import handle_torch_function

from piper.capture import autograd_refusals
from piper.capture.modes_private import function_modes, scripts_as_written
from piper.capture.source_lines import current_line


@contextmanager
def scripts_as_calls() -> Iterator[None]:
    """While this is open."""
    before = ScriptFunction.__call__

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        if has_with(function):
            raise autograd_refusals.with_in_script(current_line(), function.name)
        if function_modes():  # each of them calls it again, without itself
            return handle_torch_function(function, (), *args, **kwargs)
        return before(function, *args, **kwargs)

    ScriptFunction.__call__ = called
    try:
        with scripts_as_written():
            yield
    finally:
        ScriptFunction.__call__ = before


@lru_cache
def has_with(function: Any) -> bool:
    """A mode that C++ sets, as no_grad, is none of those that a trace records."""
    return "prim::Enter" in str(function.inlined_graph)
