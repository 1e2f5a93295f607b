"""Models and losses that ask whether any value is on one side of a number, or missing:
random microbatches mostly agree on that, and later ones do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.errors import PiperError
from piper.job.loss import trial_size

WIDTH, CLASSES = 6, 3
SGD = partial(torch.optim.SGD, lr=0.1)
Use = Callable[[nn.Module, nn.Module, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.use = use
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.one, self.other, x)


class Tokens(nn.Module):
    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.use = nn.Embedding(9, CLASSES), use
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.use(self.table, ids)


def weighed(weight: Tensor, layer: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, weight, layer.bias)  # type: ignore[arg-type]


OF_NUMBERS: dict[str, Use] = {
    "any": lambda l, _, x: l(x) * (x > 2.0).any(),
    "any below": lambda l, _, x: l(x) * (1 + (x < -2.5).any()),
    "all": lambda l, _, x: l(x) * (~(x.abs() < 1.0).all()),
    "all large": lambda l, _, x: l(x) * (1 + (x.abs() > 0.5).all()),
    "and": lambda l, _, x: l(x) * ((x[:, :3] > 0) & (x > 1.8).any()),
    "where": lambda l, u, x: torch.where((x > 1.9).any(), l(x), u(x)),
    "weights": lambda l, u, x: weighed(
        torch.where((x > 1.9).any(), l.weight, u.weight),
        l,
        x,  # type: ignore[arg-type]
    ),
    "masked weights": lambda l, _, x: weighed(
        l.weight.masked_fill((x > 2.0).any(), 0.1),
        l,
        x,  # type: ignore[operator]
    ),
    "bias": lambda l, _, x: x[:, :3] * l.bias * (x < 2.0).all(),  # type: ignore[operator]
    "of outputs": lambda l, u, x: u(x) * (1 + (l(x) > 1.5).any()),
    "chosen": lambda l, u, x: l(x) * torch.stack([u.bias, l.bias])[(x > 2.0).any().long()],  # type: ignore[arg-type, list-item]
}
OF_INTEGERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "padding": lambda e, t: e(t).mean(1) * (1 + (t == 0).any()),
    "some large": lambda e, t: e(torch.where((t > 5).any(), t, (t + 1) % 9)).mean(1),
    "all of one": lambda e, t: e(t).mean(1) * (1 + (t == 3).all()),
    "all small": lambda e, t: e(t).mean(1) * (2 - 1 * (t < 6).all()),
}


COLUMNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "any": lambda e, t: e(t).sum(1) / (t != 0).any(0).sum(),
    "sum": lambda e, t: e(t).sum(1) / ((t != 0).sum(0) > 0).sum(),
    "largest": lambda e, t: e(t).sum(1) / (t.amax(0) > 0).sum(),
    "all": lambda e, t: e(t).sum(1) / (5 - (t == 0).all(0).sum()),
    "part": lambda e, t: e(t).sum(1) * (t != 0).any(0).double().mean(),
    "mask": lambda e, t: (e(t) * (t != 0).any(0)[None, :, None]).sum(1),
    "numbers": lambda e, t: (e(t) * (t != 0).long().amax(0)[None, :, None]).sum(1),
}


def told(model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], parts: int) -> bool:
    try:
        rehearse(model, loss, [Place(where(), [0]), Split("MB", parts)], [batch], optimizer=SGD)
    except PiperError as error:
        return "fix:" in str(error)
    return False


def numbers(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=draw)


@one_of(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("use", OF_NUMBERS.values(), ids=OF_NUMBERS)
def test_what_any_number_decides_is_warned_of(
    use: Use, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    batch = numbers(seed), torch.zeros(8, CLASSES).double()
    assert told(Net(use), F.mse_loss, batch, 2) or "one microbatch" in caplog.text


@one_of(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("use", OF_INTEGERS.values(), ids=OF_INTEGERS)
def test_what_any_integer_decides_is_warned_of(
    use: Callable[[nn.Module, Tensor], Tensor], seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    draw = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, 9, (8, 5), generator=draw), torch.zeros(8, CLASSES).double()
    assert told(Tokens(use), F.mse_loss, batch, 2) or "one microbatch" in caplog.text


@one_of(2)
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("use", COLUMNS.values(), ids=COLUMNS)
def test_columns_of_padding_are_warned_of(
    use: Callable[[nn.Module, Tensor], Tensor], parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first batch has no padding."""
    ids = torch.randint(1, 9, (8, 5), generator=torch.Generator().manual_seed(0))
    batch = ids, torch.zeros(8, CLASSES).double()
    assert told(Tokens(use), F.mse_loss, batch, parts) or "one microbatch" in caplog.text


def column_means(o: Tensor, y: Tensor) -> Tensor:
    known = ~y.isnan()
    errors = (o - y.nan_to_num()).square() * known
    return (errors.sum(0) / known.sum(0).clamp(min=1)).mean()


def known_part(o: Tensor, y: Tensor) -> Tensor:
    each = (o - y.nan_to_num()).square()
    return each.mean() * (1 + y.isnan().double().mean())


def finite(o: Tensor, y: Tensor) -> Tensor:
    known = torch.isfinite(y)
    return torch.where(known, o - y, 0).square().mean() * (1 + known.double().mean())


def share(value: int, **options: object) -> Loss:
    def loss(o: Tensor, y: Tensor) -> Tensor:
        sums = F.cross_entropy(o, y, reduction="sum", **options)  # type: ignore[arg-type]
        return sums / len(y) * (1 + (y == value).double().mean())

    return loss


MISSING: dict[str, Loss] = {"columns": column_means, "part": known_part, "finite": finite}
LABELS: dict[str, Loss] = {
    "ignored": share(255, ignore_index=255),
    "-1": share(-1, ignore_index=-1),
    "third": lambda o, y: F.cross_entropy(o, y) * (1 + (y >= 2).double().mean()),
    "equal": lambda o, y: F.cross_entropy(o, y) * (1 + (y == 2).double().mean()),
    "isin": lambda o, y: (
        F.cross_entropy(o, y) * (1 + torch.isin(y, torch.tensor([2])).double().mean())
    ),
}


@pytest.fixture(params=[False, True], ids=["small", "large"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(trial_size, "LIMIT", 0)


@one_of(2)
@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("loss", MISSING.values(), ids=MISSING)
def test_losses_of_missing_numbers_are_refused_or_warned_of(
    loss: Loss, parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first batch has none."""
    batch = numbers(0), numbers(1)[:, :CLASSES]
    found = told(Net(lambda l, _, x: l(x)), loss, batch, parts)
    assert found or "one microbatch" in caplog.text


@one_of(3)
@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("loss", LABELS.values(), ids=LABELS)
def test_losses_of_labels_that_come_later_are_refused_or_warned_of(
    loss: Loss, parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    batch = numbers(0), torch.tensor([0, 1] * 4)
    found = told(Net(lambda l, _, x: l(x)), loss, batch, parts)
    assert found or "one microbatch" in caplog.text
