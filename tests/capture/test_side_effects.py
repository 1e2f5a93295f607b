"""What a trace cannot see is refused, never silently wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from piper.capture import capture
from piper.errors import CaptureError

HOOK = (
    "it has a hook on gradients, which is not supported: backward graphs never call it\n"
    "  fix: remove the hook, and change gradients in the loss or in the optimizer"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("n", torch.ones(()))
        self.count, self.seen = 0, []
        self.all = [self.n]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def hooked_parameter() -> nn.Module:
    model = Net()
    model.a.weight.register_hook(lambda grad: grad * 3)
    return model


def hooked_module() -> nn.Module:
    model = Net()
    model.b.register_full_backward_hook(lambda module, given, made: None)
    return model


def tied_by_memory() -> nn.Module:
    model = Net()
    model.b.weight.data = model.a.weight.data
    return model


class Counts(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class Collects(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        return super().forward(x)


class WritesThroughAList(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.all[0].add_(1)
        return super().forward(x) * self.n


class WritesToItsInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Inference(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            gate = self.a(x).sigmoid()
        return self.b(x) * gate


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hooked_parameter, f"parameter a.weight: {HOOK}"),
        (hooked_module, f"module b: {HOOK}"),
        (
            tied_by_memory,
            "parameter b.weight: it shares memory with a.weight, but is another tensor\n"
            "  fix: tie them as one parameter: model.b.weight = model.a.weight",
        ),
        (
            Counts,
            "test_side_effects.py:50: the forward changes model.count, which a captured step would "
            "not repeat\n"
            '  fix: make it a buffer: self.register_buffer("count", torch.tensor(...))',
        ),
        (
            Collects,
            "test_side_effects.py:56: the forward changes model.seen, which a captured step would "
            "not repeat\n"
            "  fix: keep it in a buffer, or change it in your training loop: Piper reads it in "
            "each step",
        ),
        (
            WritesToItsInput,
            "model: its forward writes to tensor 0 of the batch\n"
            "  fix: write to a copy: x = x.clone()",
        ),
    ],
    ids=["hooked parameter", "hooked module", "tied by memory", "counts", "collects", "input"],
)
def test_what_a_trace_cannot_see_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(CaptureError) as refused:
        capture(make(), nn.functional.mse_loss, (torch.zeros(2, 6), torch.zeros(2, 6)))

    assert str(refused.value) == message


def test_a_loss_that_writes_to_its_labels_is_refused_as_the_loss() -> None:
    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, labels.mul_(2))

    with pytest.raises(CaptureError, match=r"^loss: it writes to tensor 1 of the batch"):
        capture(nn.Linear(6, 6), loss_fn, (torch.zeros(2, 6), torch.zeros(2, 6)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (WritesThroughAList, "changes n in another way than through self.n"),
        (Inference, "inference_mode is not supported\n  fix: use torch.no_grad()"),
    ],
    ids=["through a list", "inference mode"],
)
def test_it_is_refused_where_it_happens(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(CaptureError) as refused:
        capture(make(), nn.functional.mse_loss, (torch.zeros(2, 6), torch.zeros(2, 6)))

    assert words in str(refused.value)


def test_inference_mode_works_again_after_a_capture() -> None:
    capture(Net(), nn.functional.mse_loss, (torch.zeros(2, 6), torch.zeros(2, 6)))

    with torch.inference_mode():
        assert torch.ones(1).is_inference()


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.inner = {"tensor": (tensor,)}


class Held(Net):
    """A view of a parameter that is no attribute itself: updates of the parameter change it."""

    def __init__(self, hold: Callable[..., object], get: Callable[..., Tensor]) -> None:
        super().__init__()
        self.held, self.get = hold(self.a.weight.detach()[:3]), get

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + self.get(self.held).sum(0)


@pytest.mark.parametrize(
    ("hold", "get"),
    [
        (lambda t: [t], lambda held: held[0]),
        (lambda t: {"deep": [{"t": t}]}, lambda held: held["deep"][0]["t"]),
        (Holder, lambda held: held.inner["tensor"][0]),
    ],
    ids=["list", "dict", "object"],
)
def test_a_view_of_a_parameter_is_found_however_deep_it_is_held(
    hold: Callable[..., object], get: Callable[..., Tensor]
) -> None:
    with pytest.raises(
        CaptureError, match=r"test_side_effects.py:\d+: the loss or the model reads"
    ):
        capture(Held(hold, get), nn.functional.mse_loss, (torch.zeros(2, 6), torch.zeros(2, 6)))
