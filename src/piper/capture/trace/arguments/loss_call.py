"""Call the user's loss function. If it fails, say what it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from piper.capture.torch_private import pytree
from piper.names import with_article

SHOWN = 4  # tensors of an output with many


def called(loss_fn: Callable[[Any, Any], Any], output: Any, labels: Any) -> Any:
    try:
        return loss_fn(output, labels)
    except Exception as error:
        error.add_note(
            f"loss_fn(output, labels) raised it: output is {described(output)}, "
            f"labels are {described(labels)}"
        )
        if isinstance(output, Mapping) and (names := [str(name) for name in output]):
            kind = with_article(type(output).__name__)
            error.add_note(
                f"  fix: the output is {kind} with {', '.join(names[:SHOWN])}: "
                f"write output[{names[0]!r}] in loss_fn, for instance"
            )
        raise


def described(value: Any) -> str:
    """
    >>> import torch
    >>> described(torch.zeros(2, 3)), described({"a": torch.zeros(1), "b": 2})
    ('[2, 3] of float32', '[1] of float32 and an int')
    """
    leaves = pytree.tree_leaves(value)
    texts = [one(leaf) for leaf in leaves[:SHOWN]]
    return " and ".join(texts + [f"{len(leaves) - SHOWN} more"] * (len(leaves) > SHOWN))


def one(leaf: Any) -> str:
    if leaf is None:
        return "None"
    if not isinstance(leaf, Tensor):
        return with_article(type(leaf).__name__)
    return f"{list(leaf.shape)} of {str(leaf.dtype).removeprefix('torch.')}"
