"""What torch's transformers decide by values that a trace does not have."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

LOG = logging.getLogger("piper")


@contextmanager
def transformers_as_in_eager() -> Iterator[None]:
    """While this is open, they compute what they compute outside of a trace."""
    with masks_as_given(), padding_left_out():
        yield


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


@contextmanager
def padding_left_out() -> Iterator[None]:
    """An encoder that has no gradients and is given a padding mask makes a nested tensor, if all
    rows have their padding at the end. Its outputs there are zeros, before its last norm."""
    kind: Any = nn.TransformerEncoder
    original = kind.forward

    def forward(
        self: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Any:
        padding = src_key_padding_mask
        if padding is None or mask is not None or not makes_nested(self, src):
            return original(self, src, mask, padding, is_causal)
        norm, self.norm = self.norm, None
        try:
            found = original(self, src, mask, padding, is_causal)
        finally:
            self.norm = norm
        found = found.masked_fill(left_out(padding, self.mask_check).unsqueeze(-1), 0.0)
        return found if norm is None else norm(found)

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = original


def makes_nested(encoder: Any, src: Tensor) -> bool:
    """Whether it would, but for the values of the mask."""
    first = encoder.layers[0]
    wanted = getattr(encoder, "use_nested_tensor", False) and not first.training
    wanted = wanted and torch.backends.mha.get_fastpath_enabled() and src.dim() == 3
    graded = torch.is_grad_enabled() and any(
        one.requires_grad for one in (src, *first.parameters())
    )
    return wanted and not graded and not torch.is_autocast_enabled()


def left_out(padding: Tensor, checked: bool) -> Tensor:
    """Where there is padding, if that of all rows is at their end."""
    there = padding if padding.dtype == torch.bool else padding != 0
    if not checked:
        return there
    say_who_decides()
    return there & ~(there[:, :-1] & ~there[:, 1:]).any()


@lru_cache  # said once
def say_who_decides() -> None:
    LOG.info(
        "nn.TransformerEncoder leaves padding out where it has no gradients, if all rows of a "
        "microbatch have theirs at the end (plain PyTorch: all rows of the batch); pad all rows at "
        "the same side, or set enable_nested_tensor=False"
    )
