"""Every private API of torch about modes that are open around a call."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def unobserved() -> Iterator[None]:
    """Modes of the caller, such as counters, see nothing of what runs inside. That of a default
    device stays."""
    count = torch._C._len_torch_function_stack()
    modes = [torch._C._pop_torch_function_stack() for _ in range(count)]
    devices = [one for one in reversed(modes) if isinstance(one, DeviceContext)]
    for one in devices:
        torch._C._push_on_torch_function_stack(one)
    try:
        with _disable_current_modes():
            yield
    finally:
        for _ in devices:
            torch._C._pop_torch_function_stack()
        for one in reversed(modes):
            torch._C._push_on_torch_function_stack(one)


def function_modes() -> int:
    """How many modes are open that see calls of torch's functions."""
    found: int = torch._C._len_torch_function_stack()
    return found


@contextmanager
def scripts_as_written() -> Iterator[None]:
    """Functions of torch.jit.script run their first graph, and not another one after some calls,
    which the executor makes of what it has seen."""
    before = torch._C._jit_set_profiling_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_profiling_mode(before)
