"""Python state that the user's backwards read is seen when it changes; they may not change it."""

import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from piper import Trainer
from piper.capture import capture
from piper.capture.python_state.watch import Watch
from piper.errors import CaptureError

SCALES = [1.0]
TABLE = torch.ones(())
other = types.ModuleType("another_file")
other.scale = 1.0  # type: ignore[attr-defined]


class Settings:
    scale = 1.0


def scaled(gradient: Tensor) -> Tensor:
    return gradient * Settings.scale


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        ctx.module = rest[0] if rest else None
        return x.view_as(x)


class OfItsClass(Passes):
    scale = 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * OfItsClass.scale, None


class Alone(torch.autograd.Function):
    """Its calls are one operator in all captures."""

    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Alone.scale


class OfAList(Passes):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * SCALES[0], None


class OfAnotherFile(Passes):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * other.scale, None


class ByAHelper(Passes):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return scaled(gradient), None


class Inherited(OfItsClass):
    pass


class OfATensor(Passes):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * TABLE, None


class OfAModule(Passes):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.module.scale, None


class InItsContext(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(x: Tensor, *rest: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = InItsContext.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.scale, None


@torch.library.custom_op("tests_backward_state::passes", mutates_args=())
def passes(x: Tensor) -> Tensor:
    return x.clone()


passes.register_fake(torch.empty_like)
passes.register_autograd(lambda ctx, gradient: gradient * SCALES[0])


class AsOperator:
    apply = staticmethod(lambda x, module: passes(x))


class ByName:
    apply = staticmethod(lambda x, module: torch.ops.tests_backward_state.passes(x))


class Net(nn.Module):
    steps: Tensor

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.function, self.scale, self.counted = function, 1.0, 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        given = () if self.function is Alone else (self,)
        return self.b(self.function.apply(self.a(x), *given))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 4, 4, generator=made, dtype=torch.float64)
    return x, y


def set_scale(net: Net, scale: float) -> None:
    """Only where the function of the network reads it."""
    match net.function.__name__:
        case "OfItsClass" | "Inherited":
            OfItsClass.scale = scale
        case "Alone":
            Alone.scale = scale
        case "InItsContext":
            InItsContext.scale = scale
        case "OfAnotherFile":
            other.scale = scale  # type: ignore[attr-defined]
        case "ByAHelper":
            Settings.scale = scale
        case "OfATensor":
            TABLE.fill_(scale)
        case "OfAModule":
            net.scale = scale
        case _:
            SCALES[0] = scale


READS = [Alone, OfItsClass, OfAList, OfAnotherFile, ByAHelper, Inherited, OfATensor,
         OfAModule, InItsContext, AsOperator, ByName]  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    for function in READS:
        set_scale(Net(function), 1.0)


@pytest.mark.parametrize("function", READS)
def test_what_a_backward_reads_is_watched(function: Any) -> None:
    net = Net(function)
    seen = Watch(net, mse_loss)
    assert seen.now() == 0

    set_scale(net, 2.0)
    assert seen.now() != 0


@pytest.mark.parametrize("function", [Alone, AsOperator])
def test_a_backward_computes_with_what_the_loop_sets(function: Any) -> None:
    trained, plain = Net(function), Net(function)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    made = partial(torch.optim.SGD, lr=0.3)
    trainer = Trainer(trained, mse_loss, example=batch(), optimizer=made)
    for step in range(3):
        set_scale(trained, 1.0 + step)
        loss = mse_loss(plain(batch(step)[0]), batch(step)[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step(*batch(step)).loss == pytest.approx(loss.item(), abs=1e-12)
    found = trainer.state_dict()
    for name, one in plain.state_dict().items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=1e-12)


def test_operators_that_torch_makes_later_change_nothing() -> None:
    seen = Watch(Net(Alone), mse_loss)

    def made(x: Tensor) -> Tensor:
        return x.clone()

    made.__module__ = "torch._prims"
    late = torch.library.custom_op("tests_backward_state::late", made, mutates_args=())
    late.register_autograd(lambda ctx, gradient: gradient * SCALES[0])
    assert seen.now() == 0


def test_functions_of_installed_libraries_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MoEAuxLossAutoScaler of Megatron."""
    library = types.ModuleType("a_library")
    library.__file__ = "/usr/lib/site-packages/a_library.py"
    monkeypatch.setitem(sys.modules, "a_library", library)
    code = """
import torch
class Scaler(torch.autograd.Function):
    scale = 1.0
    @staticmethod
    def forward(ctx, x, _): return x.view_as(x)
    @staticmethod
    def backward(ctx, g): return g * Scaler.scale, None
"""
    exec(compile(code, library.__file__, "exec"), vars(library))  # noqa: S102
    net = Net(library.Scaler)
    seen = Watch(net, mse_loss)
    library.Scaler.scale = 2.0
    assert seen.now() != 0


class Counts(Passes):
    count = 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Counts.count += 1
        return gradient * Counts.count, None


class OnlyCounts(Passes):
    count = 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        OnlyCounts.count += 1
        return gradient * 2, None


class Appends(Passes):
    kept: list[int] = []  # noqa: RUF012

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Appends.kept.append(1)
        return gradient * len(Appends.kept), None


class Remembers(Passes):
    last: Any = 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Remembers.last = gradient + Remembers.last
        return gradient + Remembers.last, None


class KeepsTheLast(Passes):
    last: Any = None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        KeepsTheLast.last = gradient
        return gradient * 2, None


class CountsInTheModel(Passes):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.module.counted += 1
        return gradient * ctx.module.counted, None


class WritesToABuffer(Passes):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.module.steps.add_(1)
        return gradient, None


class AssignsABuffer(Passes):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.module.steps = gradient.norm()
        return gradient, None


class ReadsAWeight(Passes):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.module.a.weight, None


class WritesToASavedTensor(Passes):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.saved_tensors[0].data.mul_(0.9)
        return gradient, None


class WritesToAGlobal(Passes):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        TABLE.add_(1)
        return gradient * TABLE, None


REFUSED: dict[Any, str] = {
    Counts: "changes Counts.count",
    Appends: "changes Appends.kept",
    Remembers: "changes Remembers.last",
    CountsInTheModel: "counted",
    WritesToABuffer: "writes to a tensor",
    AssignsABuffer: "changes steps",
    ReadsAWeight: "reads a.weight",
    WritesToASavedTensor: "writes to a tensor",
    WritesToAGlobal: "writes to a tensor",
}


@one_of(3)
@pytest.mark.parametrize("function", REFUSED)
def test_what_a_step_would_not_repeat_is_refused(function: Any) -> None:
    with pytest.raises(CaptureError, match=REFUSED[function]):
        capture(Net(function), mse_loss, batch())
    assert Counts.count == 0 and Appends.kept == [] and Remembers.last == 0


@pytest.mark.parametrize("function", [OnlyCounts, KeepsTheLast])
def test_what_no_step_reads_may_change(function: Any) -> None:
    capture(Net(function), mse_loss, batch())
    assert OnlyCounts.count == 0
    assert KeepsTheLast.last is None  # no tensor of a trace stays behind


def writes_to_its_own(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient).add_(gradient).mul_(2)


def writes_to_a_view(gradient: Tensor) -> Tensor:
    found = gradient.clone()
    found[:, 0].zero_()
    found.t()[1] = 0
    return found


def writes_to_its_gradient(gradient: Tensor) -> Tensor:
    return gradient.contiguous().mul_(2)


@pytest.mark.parametrize("how", [writes_to_its_own, writes_to_a_view, writes_to_its_gradient])
def test_a_backward_may_write_to_what_it_made(how: Callable[[Tensor], Tensor]) -> None:
    class Writes(Passes):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return how(gradient), None

    capture(Net(Writes), mse_loss, batch())


def test_an_edited_backward_is_never_read_from_the_cache(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPER_CACHE", str(tmp_path))
    for scale in (1.0, 2.0):
        Alone.scale = scale
        assert capture(Net(Alone), mse_loss, batch()).was_read == 0
