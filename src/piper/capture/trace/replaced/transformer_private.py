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
    with masks_as_given(), padding_left_out(), masks_as_bools():
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
    return wanted and not has_gradients(first, src) and not torch.is_autocast_enabled()


def has_gradients(layer: nn.Module, src: Tensor) -> bool:
    given = (src, *layer.parameters())
    return torch.is_grad_enabled() and any(one.requires_grad for one in given)


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


@contextmanager
def masks_as_bools() -> Iterator[None]:
    """A layer that has no gradients runs in one kernel, for which a number in a mask is only true
    or false: it leaves out all that is not 0."""
    kind: Any = nn.TransformerEncoderLayer
    original = kind.forward

    def forward(
        self: Any,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        masks = [src_mask, src_key_padding_mask]
        if is_one_kernel(self, src):
            masks = [one if one is None or one.dtype == torch.bool else one != 0 for one in masks]
        return original(self, src, *masks, is_causal)

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = original


def is_one_kernel(layer: Any, src: Tensor) -> bool:
    attention = layer.self_attn
    wanted = torch.backends.mha.get_fastpath_enabled() and src.dim() == 3 and not layer.training
    wanted = wanted and attention.batch_first and attention._qkv_same_embed_dim
    wanted = wanted and attention.in_proj_bias is not None and attention.num_heads % 2 == 0
    wanted = wanted and bool(layer.activation_relu_or_gelu) and layer.norm1.eps == layer.norm2.eps
    wanted = wanted and not torch.is_autocast_enabled() and not has_gradients(layer, src)
    return wanted and not any(map(has_hooks, layer.modules()))


def has_hooks(module: nn.Module) -> bool:
    """Of the user: a trace has its own."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not str(one.__module__).startswith("piper.") for one in hooks)
