"""A function of torch.jit.script is one call to whoever watches calls, as one of torch is.

TorchScript calls operators from C++. Those without values then call others in Python, but only the
first time: later they know the sizes of the results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.jit import ScriptFunction
from torch.overrides import handle_torch_function

from piper.capture.modes_private import function_modes, scripts_as_written


@contextmanager
def scripts_as_calls() -> Iterator[None]:
    """While this is open."""
    before = ScriptFunction.__call__

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function_modes():  # each of them calls it again, without itself
            return handle_torch_function(function, (), *args, **kwargs)
        return before(function, *args, **kwargs)

    ScriptFunction.__call__ = called
    try:
        with scripts_as_written():
            yield
    finally:
        ScriptFunction.__call__ = before
