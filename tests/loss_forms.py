"""The proof about a loss, and how far microbatches with its weights are from the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piper.capture.loss import LossForm, form_from_json, form_to_json, function_form
from piper.job.batch.batch import Batch
from piper.job.loss.loss_reduction import reduction_of

ROWS, PARTS, CLASSES = 4, 3, 5
Loss = Callable[[Any, Any], Tensor]


def batch(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and labels of all microbatches: scores, tokens, targets, masks and weights."""
    generator = torch.Generator().manual_seed(seed)
    n, t, c = ROWS * PARTS, 6, CLASSES

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, c, (n, t), generator=generator)
    labels[draw(n, t) > 0.8] = -100
    outputs = {"x": draw(n, c), "tokens": draw(n, t, c)}
    wanted = {
        "y": draw(n, c), "k": labels[:, 0].clamp(min=0), "labels": labels,
        "mask": draw(n, c) > -0.5, "weight": draw(n).exp(),
    }  # fmt: skip
    return outputs, wanted


def form_of(loss: Loss, parts: int = PARTS) -> LossForm:
    outputs, wanted = batch(0)
    leaves, spec = pytree.tree_flatten(outputs)
    described = [((len(leaf) // parts, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    example = Batch.of((wanted,)).part(0, parts).arguments
    return function_form(loss, (described, spec), example, LossForm())


def difference(loss: Loss, form: LossForm, seed: int, parts: int = PARTS) -> float:
    """The loss of the batch, against that of its microbatches with their shares."""
    outputs, wanted = batch(seed)
    reduction = reduction_of(None, False, None, parts, form_from_json(form_to_json(form)))
    given, made = Batch.of((wanted,)), Batch.of((outputs,))
    own = reduction.weights(given, parts)
    shares = reduction.shares(own, sum(own))
    pairs = zip(made.parts(parts), given.parts(parts), shares, strict=True)
    found = sum(float(loss(a.arguments[0], b.arguments[0])) * share for a, b, share in pairs)
    whole = float(loss(outputs, wanted))
    return abs(found - whole) / max(abs(whole), 1e-3)  # some losses are 0 but for rounding
