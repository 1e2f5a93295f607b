"""State that is read by code behind operators of `torch.library.Library`, which torch keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from piper import Trainer
from piper.capture import capture
from piper.capture.python_state.watch import Watch
from piper.errors import CaptureError

SCALES, COUNTED = [1.0], [0]
KEPT: dict[str, Any] = {"calls": 0, "last": None}
LIBRARY = torch.library.Library("tests_operator_code", "DEF")
EXPLICIT = "CompositeExplicitAutograd"


def operator(name: str, kernel: Callable[..., Any], schema: str = "(Tensor x) -> Tensor") -> str:
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, kernel, EXPLICIT)
    return f"tests_operator_code::{name}"


def kept_scale(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.strength = SCALES[0]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * SCALES[0]


def counted(ctx: Any, gradient: Tensor) -> Tensor:
    KEPT["calls"] += 1
    return gradient * KEPT["calls"]


def keeps_the_last(ctx: Any, gradient: Tensor) -> Tensor:
    KEPT["last"] = gradient
    return gradient * 2


def counts_in_a_kernel(x: Tensor) -> Tensor:
    COUNTED[0] += 1
    return x * COUNTED[0]


register = torch.library.register_autograd
register(operator("backward", torch.clone), lambda ctx, gradient: gradient * SCALES[0])
register(
    operator("of_a_list", lambda xs: xs[0].clone(), "(Tensor[] xs) -> Tensor"),
    lambda ctx, gradient: [gradient * SCALES[0]],
)
register(
    operator("context", torch.clone),
    lambda ctx, gradient: gradient * ctx.strength,
    setup_context=kept_scale,
)
operator("kernel", torch.clone)
LIBRARY.impl("kernel", lambda x: Scaled.apply(x), "Autograd")
LIBRARY.define("composite(Tensor x) -> Tensor")
LIBRARY.impl("composite", lambda x: x * SCALES[0], "CompositeImplicitAutograd")
torch.library.define("tests_operator_code_2::by_name", "(Tensor x) -> Tensor")
torch.library.impl("tests_operator_code_2::by_name", "cpu", torch.clone)
torch.library.register_fake("tests_operator_code_2::by_name", torch.empty_like)
register("tests_operator_code_2::by_name", lambda ctx, gradient: gradient * SCALES[0])

register(operator("counts", torch.clone), counted)
LIBRARY.define("counting_kernel(Tensor x) -> Tensor")
LIBRARY.impl("counting_kernel", counts_in_a_kernel, "CompositeImplicitAutograd")
register(operator("keeps", torch.clone), keeps_the_last)

made = torch.ops.tests_operator_code
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "backward": made.backward,
    "of a list": lambda x: made.of_a_list([x]),
    "context": made.context,
    "kernel": made.kernel,
    "composite": made.composite,
    "by name": torch.ops.tests_operator_code_2.by_name,
}


class Net(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.mix(self.a(x)))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn[0], drawn[1]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    SCALES[0], COUNTED[0], KEPT["calls"], KEPT["last"] = 1.0, 0, 0, None


@one_of(2)
@pytest.mark.parametrize("name", every(3, READS))
@pytest.mark.filterwarnings("ignore:At pre-dispatch tracing")
def test_state_that_it_reads_is_watched(name: str) -> None:
    net = Net(READS[name])
    capture(net, mse_loss, batch())
    seen = Watch(net, mse_loss)
    assert seen.now() == 0

    SCALES[0] = 2.0
    assert seen.now() != 0


def scaled_batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The loop sets another strength before each step."""
    for step in range(steps):
        SCALES[0] = 1.0 + step
        yield batch(step)


def test_training_follows_it() -> None:
    plain, sgd = Net(made.kernel), partial(torch.optim.SGD, lr=0.3)
    expected = plain_losses(
        sgd(plain.parameters()), scaled_batches(3), lambda x, y: mse_loss(plain(x), y)
    )
    trainer = Trainer(Net(made.kernel), mse_loss, example=batch(), optimizer=sgd)
    found = [trainer.step(*one).loss for one in scaled_batches(3)]

    assert found == pytest.approx(expected, abs=1e-12)
    for key, one in trainer.state_dict().items():
        torch.testing.assert_close(plain.state_dict()[key], one, rtol=0, atol=1e-12)
    trainer.close()


@one_of(2)
@pytest.mark.parametrize(
    ("name", "changed"), [("counts", r"KEPT\['calls'\]"), ("counting_kernel", r"COUNTED\[0\]")]
)
@pytest.mark.filterwarnings("ignore:At pre-dispatch tracing")
def test_what_a_step_would_not_repeat_is_refused(name: str, changed: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_operator_code.py:\d+: .* changes {changed}"):
        capture(Net(getattr(made, name)), mse_loss, batch())


def test_no_tensor_of_a_trace_stays_behind() -> None:
    capture(Net(made.keeps), mse_loss, batch())
    assert KEPT["last"] is None
