"""What torch's transformers decide by values that a trace does not have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import transformer


@contextmanager
def masks_as_given() -> Iterator[None]:
    """They look at the values of a mask, to see whether it is causal.

    That is a hint only: without it, attention uses the mask that it was given, and computes the
    same.
    """
    module: Any = transformer
    original = module._detect_is_causal_mask
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        module._detect_is_causal_mask = original
