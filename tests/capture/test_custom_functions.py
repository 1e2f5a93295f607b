"""autograd.Functions: the user's backward, not the derivative of the user's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture.interpreter import assert_close
from draws import every
from torch import Tensor, nn
from torch.autograd import Function

from piper.capture import annotate, capture
from piper.errors import CaptureError


class Gelu(Function):
    """As in Bloom: the backward computes the derivative from what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)
        return slope * grad


class Reversed(Function):
    """A gradient that is not the derivative, and an argument that is a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class Straight(Function):
    """A step whose derivative is zero, trained through its saturated straight line."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_non_differentiable(x > 0)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-2, 1e-2)


class Product(Function):
    """Two tensors, two results, a setup_context, and gradients that are wanted for some."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, power: int = 2) -> tuple[Tensor, Tensor]:
        return x * y, x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y, ctx.power = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        dy = x * one if ctx.needs_input_grad[1] else None
        return y * one + 3 * two, dy, None


class Identity(Function):
    @staticmethod
    def forward(ctx: Any, given: list[Tensor], x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, 2 * grad


def both(x: Tensor) -> Tensor:
    one, two = Product.apply(x, x.tanh(), 2)
    return one + two


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": Gelu.apply,
    "reversed": lambda x: Reversed.apply(x, 0.5),
    "straight": Straight.apply,
    "two results": both,
    "no gradient for one": lambda x: Product.apply(x, x.detach(), 2)[0],
    "twice": lambda x: Reversed.apply(Reversed.apply(x, 0.5), 3.0),
    "a list": lambda x: Identity.apply([x, x + 1], x),
    "nested": lambda x: Gelu.apply(Straight.apply(x) * x),
    "written to afterwards": lambda x: Gelu.apply(x).mul_(2.0),
}


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head, self.function = nn.Linear(6, 1), function

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = self.function(layer(x))
        with annotate("PP"):
            return self.head(x).square().mean()


@pytest.mark.parametrize("name", every(3, FUNCTIONS))
def test_a_function_has_the_users_backward(name: str) -> None:
    model, batch = Net(FUNCTIONS[name]).double(), (torch.randn(4, 6).double(),)

    captured = capture(model, None, batch)

    assert_close(captured, model, batch)
    assert len({region.code for region in captured.model.regions[1:3]}) == 1


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class OnTheHost(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy() * 2)


class Checkpoint(Function):
    """Runs a module again in its backward, as those of many repositories do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            found = ctx.module(x)
        found.backward(grad)
        return x.grad, None


class Couplings(Checkpoint):
    """Gives gradients for the parameters, which it does not read from its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *weights: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        ctx.module, ctx.weights = module, len(weights)
        ctx.save_for_backward(x)
        return torch.cat([first + module(second), second], 1)


class Nested(nn.Module):
    def __init__(self, function: type[Function], width: int) -> None:
        super().__init__()
        self.first, self.inner, self.function = nn.Linear(6, 6), nn.Linear(width, width), function

    def forward(self, x: Tensor) -> Tensor:
        weights = self.inner.parameters() if self.function is Couplings else ()
        return self.function.apply(self.first(x), self.inner, *weights).square().mean()


@pytest.mark.parametrize(("function", "width"), [(Checkpoint, 6), (Couplings, 3)])
def test_a_function_that_runs_modules_is_refused_with_what_to_write(
    function: type[Function], width: int
) -> None:
    text = (
        rf"test_custom_functions.py:\d+: the forward of {function.__name__} computes with tensors"
    )

    with pytest.raises(CaptureError, match=text) as refused:
        capture(Nested(function, width), None, (torch.randn(4, 6),))
    assert "call the module itself and give the strategy remat=True" in str(refused.value)


def run_again(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight.T)


class Recomputed(Function):
    """The same with tensors only, which can be traced."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return run_again(*given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        own = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            found = run_again(*own)
        return torch.autograd.grad(found, own, grad)


def test_a_function_may_run_its_forward_again_on_tensors() -> None:
    weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
    model = Net(lambda x: Recomputed.apply(x, model.weight)).double()
    model.weight, batch = weight, (torch.randn(4, 6).double(),)

    assert_close(capture(model, None, batch), model, batch)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (InPlace, "InPlace is an autograd.Function that writes to its arguments"),
        (OnTheHost, "the backward of OnTheHost cannot be traced"),
    ],
)
def test_a_function_that_cannot_be_traced(function: type[Function], text: str) -> None:
    model = Net(lambda x: function.apply(x.clone()))

    with pytest.raises(CaptureError, match=text):
        capture(model, None, (torch.randn(4, 6),))
