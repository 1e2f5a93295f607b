"""Random batches like the example of a script, and their parts."""

from __future__ import annotations

from typing import Any

import torch

from piper.runtime.torch_private import pytree

Batch = tuple[Any, ...]


def like(example: Batch, replicas: int, generator: torch.Generator) -> Batch:
    """A random batch of all replicas together, shaped and typed like the example of one."""

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        shape = (leaf.shape[0] * replicas, *leaf.shape[1:])
        return drawn(leaf.detach().cpu(), shape, generator)

    found: Batch = pytree.tree_map(draw, example)
    return found


def drawn(seen: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Integers from the range that was seen, so that they stay in every vocabulary; with negative
    ones (labels to ignore) and for all else, from what was seen."""
    if not seen.numel():
        return seen.new_zeros(shape)
    low, high = seen.min(), seen.max()
    if seen.is_floating_point() and low == high:
        return torch.randn(shape, generator=generator).to(seen.dtype)
    if not seen.is_floating_point() and seen.dtype != torch.bool and low >= 0:
        return torch.randint(int(low), int(high) + 1, shape, generator=generator).to(seen.dtype)
    picked = torch.randint(seen.numel(), shape, generator=generator)
    return seen.flatten()[picked]


def constant_inputs(example: Batch) -> list[str]:
    leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    flat = [
        str(k)
        for k, leaf in enumerate(leaves)
        if leaf.dim() and leaf.numel() and not leaf.is_floating_point() and leaf.min() == leaf.max()
    ]
    if not flat:
        return []
    which = ", ".join(flat)
    return [
        f"input {which} of the example is one number everywhere, and so is what was drawn like it: "
        "microbatches and replicas then differ less; give an example with real data"
    ]


def doubled(batch: Batch) -> Batch:
    def double(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.double() if is_float else leaf

    found: Batch = pytree.tree_map(double, batch)
    return found


def chunk(batch: Batch, part: int, parts: int) -> Batch:
    def cut(leaf: Any) -> Any:
        has_rows = isinstance(leaf, torch.Tensor) and leaf.dim()
        return leaf.chunk(parts)[part] if has_rows else leaf

    found: Batch = pytree.tree_map(cut, batch)
    return found
