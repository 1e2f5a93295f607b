"""Observers of torch around a step, such as FlopCounterMode: they change nothing in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch.utils.module_tracker import ModuleTracker

from piper.capture.torch_private import GLOBAL_HOOKS


def is_observer(hook: Any) -> bool:
    """Whether a global hook only writes down which module runs."""
    return type(hook) is MethodType and isinstance(hook.__self__, ModuleTracker)


@contextmanager
def observers_aside() -> Iterator[None]:
    """A trace is no step: it would have hooks on gradients, which backward graphs never call."""
    every = [scope[name] for scope, name in GLOBAL_HOOKS]
    before = [dict(hooks) for hooks in every]
    for hooks in every:
        for key in [key for key, hook in hooks.items() if is_observer(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, known in zip(every, before, strict=True):
            if any(map(is_observer, known.values())):
                hooks.clear()
                hooks.update(known)
