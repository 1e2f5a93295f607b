"""Logarithms of softmax overwrite what nothing else reads, with the same bits in less memory."""

from collections.abc import Callable

import pytest
import torch
from draws import one_of
from memory_meter import Meter
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from piper.capture.graphs import workspace
from piper.capture.kernels import shipping
from piper.capture.kernels.codegen import quickened
from piper.names import B

aten = torch.ops.aten
WORDS = [1, 7, 8, 1000, 1024, 1025, 50257]


def loss_and_gradient(x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    logits = (x * 3.0).float()
    found = functional.log_softmax(logits.flatten(0, 1), -1)
    loss, weight = aten.nll_loss_forward(found, labels, None, 1, -100)
    grad = aten.nll_loss_backward(torch.ones_like(loss), found, labels, None, 1, -100, weight)
    back = aten._log_softmax_backward_data(grad, found, 1, torch.float32)
    return loss, back.to(x.dtype)


def given(words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(words)
    x = 4 * torch.randn(3, 5, words, generator=draw)
    labels = torch.randint(words, (15,), generator=draw)
    labels[::4] = -100
    return x.to(dtype), labels


@one_of(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("words", WORDS)
def test_the_bits_of_torch(words: int, dtype: torch.dtype) -> None:
    x, labels = given(words, dtype)
    module = quickened(make_fx(loss_and_gradient, tracing_mode="fake")(x, labels))
    again = shipping.from_json(shipping.to_json(module))
    expected, before = loss_and_gradient(x, labels), x.clone()

    assert module.code.count("out = ") == 2
    for found in (module(x, labels), again(x, labels)):
        assert all(map(torch.equal, found, expected))
    assert torch.equal(x, before)


def test_the_computed_memory_is_that_of_a_run() -> None:
    """The logits in float32 and the gradient in the same, instead of two of each."""
    x, labels = given(1000, torch.bfloat16)
    traced = make_fx(loss_and_gradient, tracing_mode="fake")(x, labels)
    with Meter(others=[x, labels]) as meter:
        quickened(traced)(x, labels)

    computed = workspace.count(traced, B)

    logits = 4 * x.numel()
    assert meter.peak == pytest.approx(computed, rel=0.01) == pytest.approx(2 * logits, rel=0.01)
    assert workspace.count(traced, B, without=()) == pytest.approx(3 * logits, rel=0.01)


def read_twice(x: Tensor) -> tuple[Tensor, ...]:
    logits = x * 2
    return functional.log_softmax(logits, -1), logits.sum()


def returned_as_well(x: Tensor) -> tuple[Tensor, ...]:
    logits = x * 2
    return functional.log_softmax(logits, -1), logits


def seen_through_a_view(x: Tensor) -> tuple[Tensor, ...]:
    logits = x * 2
    view = logits.view(-1)
    return functional.log_softmax(logits, -1), view + 1


def given_from_outside(x: Tensor) -> tuple[Tensor, ...]:
    return (functional.log_softmax(x.view(-1, 4), -1),)


def along_the_first_dimension(x: Tensor) -> tuple[Tensor, ...]:
    return (functional.log_softmax(x * 2, 0),)


def of_a_transposed_product(x: Tensor) -> tuple[Tensor, ...]:
    return (functional.log_softmax((x * 2).t(), -1),)


def grows_by_conversion(x: Tensor) -> tuple[Tensor, ...]:
    return (functional.log_softmax(x.bfloat16() * 2, -1, dtype=torch.float32),)


@pytest.mark.parametrize(
    "function",
    [read_twice, returned_as_well, seen_through_a_view, given_from_outside,
     along_the_first_dimension, of_a_transposed_product],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_what_is_still_needed_is_not_overwritten(function: Callable) -> None:
    x = torch.randn(6, 4)
    before = x.clone()
    module = quickened(make_fx(function, tracing_mode="fake")(x))

    found = module(x)

    assert "out = " not in module.code
    assert all(map(torch.equal, found, function(before))) and torch.equal(x, before)


def test_a_conversion_on_the_way_gives_the_same() -> None:
    x = torch.randn(6, 4)
    module = quickened(make_fx(grows_by_conversion, tracing_mode="fake")(x))

    assert torch.equal(module(x)[0], grows_by_conversion(x)[0])
