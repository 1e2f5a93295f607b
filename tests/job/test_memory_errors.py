"""Memory that runs out while a Trainer is made: the error says what its plan keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import SGD, Net, data
from torch import nn

import piper
from piper.errors import RunError

WIDTH = 512  # a layer has 1.0 MiB
KINDS: dict[str, Callable[[], Exception]] = {
    "gpu": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    "python": MemoryError,
}


def failing(
    after: int, make: Callable[[], Exception], model: nn.Module
) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer for so many buckets. There is no memory for the next."""
    made: list[torch.optim.Optimizer] = []
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def optimizer(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        size = sum(one.numel() for _, one in named)
        if size < WIDTH**2 or any(one.data_ptr() in own for _, one in named):  # it is only tried
            return SGD(named)
        if len(made) == after:
            raise make()
        made.append(SGD(named))
        return made[-1]

    return optimizer


def made_with(after: int, make: Callable[[], Exception]) -> piper.Trainer:
    example, model = data(1, 4, WIDTH)[0], Net(width=WIDTH)
    given = {"example": example, "optimizer": failing(after, make, model)}
    return piper.Trainer(model, nn.functional.mse_loss, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_says_what_the_plan_keeps(kind: str) -> None:
    with pytest.raises(RunError) as found:
        made_with(1, KINDS[kind])

    first, second, third, fix = str(found.value).splitlines()
    assert first == "device 0 stopped at the making of the Trainer, before the first step"
    assert second == (
        "  out of memory: the plan keeps 2.0 MiB of parameters and buffers here, in 2 buckets of 2 "
        "regions; 1.0 MiB of them were there; gradients, activations and the state of the "
        "optimizer come later"
    )
    assert third.startswith(f"  {type(KINDS[kind]()).__name__}: ")
    assert fix.startswith("  fix: divide the parameters over more devices")


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="^not enough memory$"):
        made_with(0, lambda: ValueError("not enough memory"))
