"""What a trace replaces is replaced in other threads, too: a loader's code is not the model's."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from piper.capture.source_lines import only_this_thread
from piper.capture.trace.decisions.seeds import refusing_seeds
from piper.capture.trace.functions import entered, intercepted
from piper.capture.trace.hidden_contexts import refusing_hidden_contexts
from piper.capture.trace.side_effects import no_python_randomness
from piper.errors import CaptureError


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def shuffled() -> bool:
    order = list(range(20))
    random.shuffle(order)
    return bool(sorted(order) == [*range(20)] and numpy.random.rand(3).shape == (3,))


def inferred() -> bool:
    with torch.inference_mode():
        return bool(torch.ones(2).sum() == 2)


def differentiated() -> bool:
    x = torch.ones(2, requires_grad=True)
    Doubled.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    return x.grad is not None and bool((x.grad == 2).all())


def seeded() -> bool:
    torch.cuda.manual_seed(torch.initial_seed())  # of no GPU, here
    return True


CASES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], bool]]] = {
    "draws": (no_python_randomness, shuffled),
    "contexts": (refusing_hidden_contexts, inferred),
    "functions": (intercepted, differentiated),
    "seeds": (refusing_seeds, seeded),
}


@pytest.mark.parametrize("name", CASES)
def test_code_of_another_thread_runs_as_ever(name: str) -> None:
    replaced, act = CASES[name]
    with ThreadPoolExecutor(1) as pool, only_this_thread(), replaced():
        assert pool.submit(act).result()


def test_functions_of_another_thread_are_not_recorded() -> None:
    opened = entered(lambda given: pytest.fail("this is not the model's"))
    with ThreadPoolExecutor(1) as pool, only_this_thread(), intercepted(), opened as ran:
        assert pool.submit(differentiated).result()

    assert not ran


def test_the_thread_that_traces_may_not_draw() -> None:
    with pytest.raises(CaptureError), only_this_thread(), no_python_randomness():
        random.setstate(random.Random(1).getstate())
