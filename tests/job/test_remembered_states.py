"""What a forward remembers of one value that the loop sets, and reads at another."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, where
from piper.errors import CaptureError, InputError

SGD = partial(torch.optim.SGD, lr=0.1)
PARTS = [Place(where(), [0]), Split("MB", 2)]
LAST = 9
EPOCHS = (0, 1, 2, 1, LAST)


class Net(nn.Module):
    """The loop sets `epoch`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.epoch = nn.Linear(4, 4).double(), 0
        self.last: Any = None
        self.held: list[float] = []

    def scale(self, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.scale(x)
        return result


class Halved(Net):
    factor = 1.0

    def scale(self, x: Tensor) -> Any:
        if self.epoch != self.last:
            self.last, self.factor = self.epoch, self.factor * 0.5
        return self.factor


class Largest(Net):
    most = 0

    def scale(self, x: Tensor) -> Any:
        self.most = max(self.most, self.epoch)
        return 1.0 + self.most


class First(Net):
    def scale(self, x: Tensor) -> Any:
        if self.last is None:
            self.last = 1.0 + self.epoch
        return (1.0 + self.epoch) / self.last


class Latched(Net):
    """Changed at one value, and read two values later."""

    def scale(self, x: Tensor) -> Any:
        if self.epoch == 1:
            self.last = True
        return 3.0 if self.last and self.epoch == LAST else 1.0


class Seen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set[int]()

    def scale(self, x: Tensor) -> Any:
        self.seen.add(self.epoch)
        return float(len(self.seen))


class Stale(Net):
    """A table of the first epoch."""

    def scale(self, x: Tensor) -> Any:
        if self.last is None:
            self.last = torch.arange(4.0, dtype=torch.float64) + self.epoch
        return self.last


class Cached(Net):
    @lru_cache  # noqa: B019
    def known(self) -> float:
        return 1.0 + self.epoch

    def scale(self, x: Tensor) -> Any:
        return self.known()


class Table(Net):
    """One that is the same in all epochs."""

    def scale(self, x: Tensor) -> Any:
        if self.last is None:
            self.last = torch.arange(4.0, dtype=torch.float64) + 1
        return self.last * (1.0 + self.epoch)


@lru_cache
def counted(size: int) -> float:
    return float(sum(range(size)))


class Counting(Net):
    def scale(self, x: Tensor) -> Any:
        return counted(4) + self.epoch


class Filled(Net):
    """What it keeps is another number in each epoch, and computed anew in each forward."""

    def scale(self, x: Tensor) -> Any:
        self.last = 1.0 + self.epoch
        return self.last


REFUSED = (Halved, Largest, First, Latched, Seen, Stale)
EXACT = (Table, Counting, Filled)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 4, 4, generator=draw).double()) for _ in EPOCHS]  # type: ignore[misc]


def losses_of(make: Callable[[], Net]) -> list[float]:
    model, found = make(), []
    with Trainer(
        model, F.mse_loss, PARTS, example=batches()[0], optimizer=SGD, device="cpu"
    ) as trainer:
        for epoch, batch in zip(EPOCHS, batches(), strict=True):
            model.epoch = epoch
            found.append(trainer.step(*batch).loss)
    return found


@one_of(2)
@pytest.mark.parametrize("make", REFUSED)
def test_what_a_later_value_finds_is_refused(make: Callable[[], Net]) -> None:
    with pytest.raises(CaptureError) as refused:
        losses_of(make)

    assert "your loop changes model.epoch, and a forward changes" in str(refused.value)


def test_a_value_is_remembered_for_any_number_of_others() -> None:
    x, y = batches()[0]
    model = Latched()
    with Trainer(model, F.mse_loss, None, example=(x, y), optimizer=SGD, device="cpu") as trainer:
        for model.epoch in range(LAST):
            trainer.step(x, y)
        model.epoch = LAST

        with pytest.raises(CaptureError, match="a forward changes model.last"):
            trainer.step(x, y)


class Smaller(Net):
    """A smaller batch of the first epoch is remembered in the next one."""

    def scale(self, x: Tensor) -> Any:
        if len(x) == 1 and self.epoch == 0:
            self.last = True
        return 3.0 if self.last and self.epoch else 1.0


class Evaluated(Net):
    def scale(self, x: Tensor) -> Any:
        if not self.training:
            self.last = True
        return 3.0 if self.last and self.epoch else 1.0


def test_another_shape_is_remembered_in_another_state() -> None:
    x, y = batches()[0]
    model = Smaller()
    with Trainer(model, F.mse_loss, None, example=(x, y), optimizer=SGD, device="cpu") as trainer:
        trainer.step(x, y)
        trainer.step(x[:1], y[:1])
        model.epoch = 1

        with pytest.raises(CaptureError, match="a forward changes model.last"):
            trainer.step(x, y)


def test_an_evaluation_is_remembered_in_another_state() -> None:
    x, y = batches()[0]
    model = Evaluated()
    with Trainer(model, F.mse_loss, None, example=(x, y), optimizer=SGD, device="cpu") as trainer:
        trainer.step(x, y)
        trainer.evaluate([(x, y)])
        model.epoch = 1

        with pytest.raises(CaptureError, match="a forward changes model.last"):
            trainer.step(x, y)


class Weighing(nn.Module):
    """A loss that counts its calls, and whose weights the loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(4, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return ((output - target).square() * self.weights).mean()


class Carrying(Weighing):
    """One that reads what it carries."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target) / self.calls


def test_buffers_of_a_loss_that_a_loop_sets_are_those_of_the_step() -> None:
    def weigh(loss_fn: Weighing, step: int) -> None:
        if step == 2:
            loss_fn.weights = torch.full((4,), 3.0, dtype=torch.float64)

    model, own = Table(), Weighing()
    expected, steps = [], SGD(model.parameters())
    for step, (x, y) in enumerate(batches()):
        weigh(own, step)
        expected += plain_losses(steps, [(x, y)], lambda x, y: own(model(x), y))
    loss_fn, found = Weighing(), []
    given = {"example": batches()[0], "optimizer": SGD, "device": "cpu"}
    with Trainer(Table(), loss_fn, None, **given) as trainer:  # type: ignore[arg-type]
        for step, batch in enumerate(batches()):
            weigh(loss_fn, step)
            found.append(trainer.step(*batch).loss)

    assert found == pytest.approx(expected, rel=1e-12)
    assert loss_fn.weights.tolist() == [3.0] * 4


WRITES: dict[str, Callable[[Weighing], Any]] = {
    "filled": lambda loss: loss.calls.fill_(1.0),
    "assigned": lambda loss: setattr(loss, "calls", torch.zeros(())),
    "loaded": lambda loss: loss.load_state_dict(loss.state_dict()),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_loss_carries_is_not_set_by_the_loop(name: str) -> None:
    x, y = batches()[0]
    loss_fn = Carrying()
    with Trainer(Table(), loss_fn, None, example=(x, y), optimizer=SGD, device="cpu") as trainer:
        trainer.step(x, y)
        WRITES[name](loss_fn)

        with pytest.raises(InputError, match="loss_fn.calls was changed after the Trainer was"):
            trainer.step(x, y)


def test_a_cached_function_that_reads_it_is_named() -> None:
    with pytest.raises(CaptureError) as refused:
        losses_of(Cached)

    assert "known remembers its results (functools.lru_cache" in str(refused.value)
    assert "reads epoch, which your loop changes" in str(refused.value)


class Outside(Net):
    def scale(self, x: Tensor) -> Any:
        if self.last is None:
            self.last = float(os.environ["PIPER_TEST_SCALE"])
        return self.last


def test_what_is_kept_of_the_environment_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PIPER_TEST_SCALE", "1")
    with Trainer(
        Outside(), F.mse_loss, PARTS, example=batches()[0], optimizer=SGD, device="cpu"
    ) as trainer:
        trainer.step(*batches()[0])
        monkeypatch.setenv("PIPER_TEST_SCALE", "2")
        trainer.step(*batches()[1])

    assert "os.environ['PIPER_TEST_SCALE'] changed, and the forward keeps what it once" in (
        caplog.text
    )


class ByNumber(Net):
    """The batch says it, and not the loop."""

    def forward(self, x: Tensor, epoch: int) -> Tensor:  # type: ignore[override]
        if epoch != self.last:
            self.last, self.epoch = epoch, self.epoch + 1
        result: Tensor = self.layer(x) * self.epoch
        return result


def test_what_a_number_of_the_batch_changes_is_refused_in_these_words() -> None:
    x, y = batches()[0]
    example = (x, 0, y)
    with Trainer(
        ByNumber(), F.mse_loss, PARTS, example=example, optimizer=SGD, device="cpu"
    ) as trainer:
        trainer.step(*example)

        with pytest.raises(CaptureError, match="batches with other numbers or texts, or in anothe"):
            trainer.step(x, 1, y)


@pytest.mark.parametrize("make", EXACT)
def test_what_is_the_same_for_all_values_trains_as_plain(make: Callable[[], Net]) -> None:
    model, epochs = make(), iter(EPOCHS)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        model.epoch = next(epochs)
        return F.mse_loss(model(x), y)

    expected = plain_losses(SGD(model.parameters()), batches(), loss)

    assert losses_of(make) == pytest.approx(expected, rel=1e-12)
