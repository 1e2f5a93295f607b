"""Random models train as plain PyTorch, or are refused with a fix: nothing crashes or differs.

`python tests/capture/test_random_models.py 0 300` prints the outcome of each, and a table.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "scripts")]

import pytest
import torch
from capture.interpreter import Interpreter, state
from capture.random_models import Net, batch_of
from draws import drawn, draws
from torch import Tensor

from piper.capture import capture
from piper.errors import PiperError

TOLERANCE = 1e-9


def plain(model: Net, batch: tuple[Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The loss, gradients and buffers of autograd."""
    model.zero_grad(set_to_none=True)
    loss = model(*batch)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, dict(model.named_buffers())


def outcome(seed: int) -> str:
    """What becomes of a model: equal, refused, invalid (in plain PyTorch, too) or different."""
    batch, reference = batch_of(seed), Net(seed)
    try:
        loss, grads, buffers = plain(reference, batch)
    except Exception as error:
        return f"invalid: {error}"
    try:
        captured = capture(Net(seed), None, batch)
    except PiperError as refused:
        return f"refused: {refused}"
    for split in (False, True):
        weights = {name: one.contiguous() for name, one in state(Net(seed)).items()}
        found_loss, found = Interpreter(captured, weights, split=split).step(batch)
        differs = different({"loss": found_loss, **found}, {"loss": loss, **grads})
        differs = differs or different(
            {name: weights[name] for name in buffers if weights[name].is_floating_point()},
            {name: one for name, one in buffers.items() if one.is_floating_point()},
        )
        if differs:
            return f"different: {differs}"
    return "equal"


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """What differs first. A gradient of zeros is none."""
    for name in {*found, *expected}:
        one, other = found.get(name), expected.get(name)
        one = torch.zeros_like(other) if one is None else one
        other = torch.zeros_like(one) if other is None else other
        tolerance = 1e-2 if one.dtype != torch.float64 else TOLERANCE
        if not torch.allclose(one.double(), other.double(), tolerance, tolerance, equal_nan=True):
            return f"{name} by {(one - other).abs().max():.1e}"
    return ""


@drawn
@pytest.mark.parametrize("seed", range(draws(2, 300)))
def test_a_random_model_trains_as_plain_pytorch_or_is_refused(seed: int) -> None:
    found = outcome(seed)

    assert not found.startswith("different"), found
    assert not found.startswith("refused") or "\n  fix: " in found


def main(first: int, end: int) -> None:
    counts: Counter[str] = Counter()
    warnings.simplefilter("ignore")
    for seed in range(first, end):
        try:
            found = outcome(seed)
        except Exception as error:
            found = f"crash: {type(error).__name__}: {error}"
        counts[found.partition(":")[0]] += 1
        short = " | ".join(found.splitlines())[:240]
        print(seed, Net(seed).names, short, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
