"""Quicker code computes the same, and overwrites nothing that is still needed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from piper.capture.kernels.codegen import quickened


def used_again(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    product = x * y
    total = product + y
    return product * total, total


def seen_through_a_view(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    product = x * y
    view = product.view(-1)
    return product + y, view * 2


def returned_as_well(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    product = x * y
    return product, product + y


def given_from_outside(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x + y, x - y)


def added_to_itself(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    product = x * y
    return (product + product,)


def grows_by_broadcast(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x[:1] * 2 + y,)


@pytest.mark.parametrize(
    "function",
    [
        used_again, seen_through_a_view, returned_as_well, given_from_outside, added_to_itself,
        grows_by_broadcast,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_memory_that_is_still_needed_is_not_overwritten(function: Callable) -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    before = x.clone(), y.clone()
    module = quickened(make_fx(function, tracing_mode="fake")(x, y))

    found = module(x, y)

    assert "add_(" not in module.code
    assert all(map(torch.equal, found, function(*before)))
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


def test_a_sum_of_fresh_terms_goes_into_the_first() -> None:
    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x * y + y * y + x,)

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = quickened(make_fx(sums, tracing_mode="fake")(x, y))

    (found,) = module(x, y)

    assert module.code.count("add_(") == 2
    assert torch.equal(found, sums(x, y)[0])
