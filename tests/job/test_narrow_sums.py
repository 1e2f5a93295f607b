"""Sums over rows that do not fit into the type they are given: of whole batches they are others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn

from piper import Place, Split, rehearse, where
from piper.errors import PiperError
from piper.job.loss import trial_size

ROWS, LENGTH, PARTS = 8, 50, 4
NARROW: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda mask: mask.sum().bool(),
    "byte": lambda mask: mask.sum().byte(),
    "char": lambda mask: mask.sum().char(),
    "short": lambda mask: (mask.sum() * 400).short(),
    "to": lambda mask: mask.sum().to(torch.uint8),
    "of a float": lambda mask: mask.double().sum().byte(),
    "summed in bytes": lambda mask: mask.sum(dtype=torch.uint8),
    "summed in bools": lambda mask: mask.sum(dtype=torch.bool),
    "summed in rows of bytes": lambda mask: mask.sum(1).sum(dtype=torch.uint8),
    "not": lambda mask: ~mask.sum().bool() + 2,
}
USES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "divides": lambda each, mask, narrow: (each * mask).sum() / narrow.clamp(min=1),
    "scales": lambda each, mask, narrow: each.mean() * (1 + narrow),
    "scales a sum": lambda each, mask, narrow: (each * mask).sum() / mask.sum() * (1 + narrow),
    "adds": lambda each, mask, narrow: each.mean() + narrow,
    "with the mean": lambda each, mask, narrow: each.mean() / (narrow / mask.double().mean()),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Rows of the second half have nearly nothing that counts."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(2):
        x = torch.rand(ROWS, LENGTH, dtype=torch.float64, generator=draw)
        mask = x > torch.tensor([0.1] * 6 + [2.0, 2.0])[:, None]
        made.append((x, mask))
    return made


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(LENGTH, LENGTH).double()


@one_of(20)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("narrow", NARROW.values(), ids=NARROW)
def test_they_are_exact_or_refused(
    narrow: Callable[[Tensor], Tensor],
    use: Callable[[Tensor, Tensor, Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for a model that is too large for a trial on numbers."""
    monkeypatch.setattr(trial_size, "LIMIT", 0)

    def loss_fn(output: Tensor, mask: Tensor) -> Tensor:
        found = narrow(mask)
        return use(output.square(), mask, found.int() if found.dtype is torch.bool else found)

    strategy = [Place(where(), [0]), Split("MB", PARTS)]
    try:
        found = rehearse(model(), loss_fn, strategy, batches(), optimizer=sgd)
    except PiperError as error:
        assert "fix:" in str(error)
        return
    plain = model()
    losses = plain_losses(sgd(plain.parameters()), batches(), lambda x, y: loss_fn(plain(x), y))
    assert found.losses == pytest.approx(losses, rel=1e-12)


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)  # type: ignore[arg-type]
