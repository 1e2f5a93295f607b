"""Inputs that meet only in the loss, as real images and noise of a GAN do, are all cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, levels_of, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.errors import InputError

ROWS, WIDTH, NOISE = 8, 6, 5
SGD = partial(torch.optim.SGD, lr=0.1)
Loss = Callable[[Tensor, Tensor], Tensor]


def draw(seed: int, rows: int, width: int) -> Tensor:
    return torch.randn(
        rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


class Gan(nn.Module):
    """What the discriminator says of both, or the loss itself."""

    def __init__(self, loss: Loss | None = None, meet: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(NOISE, WIDTH), nn.Linear(WIDTH, 1)
        self.loss, self.meet = loss, meet
        self.double()

    def forward(self, real: Tensor, noise: Tensor) -> Any:
        fake = torch.tanh(self.generator(noise))
        if self.meet is not None:
            real = self.meet(real, fake)
        found = self.critic(real)[:, 0], self.critic(fake)[:, 0]
        return found if self.loss is None else self.loss(*found)


LOSSES: dict[str, Loss] = {
    "logistic": lambda r, f: F.softplus(-r).mean() + F.softplus(f).mean(),
    "hinge": lambda r, f: F.relu(1 - r).mean() + F.relu(1 + f).mean(),
    "wasserstein": lambda r, f: f.mean() - r.mean(),
    "least squares": lambda r, f: 0.5 * ((r - 1) ** 2).mean() + 0.5 * (f**2).mean(),
    "entropy": lambda r, f: (
        F.binary_cross_entropy_with_logits(r, torch.ones_like(r))
        + F.binary_cross_entropy_with_logits(f, torch.zeros_like(f))
    ),
    "sums": lambda r, f: F.softplus(-r).sum() + F.softplus(f).sum(),
    "over rows": lambda r, f: F.softplus(-r).sum() / len(r) + (f.norm() ** 2) / len(f),
}
NO_MEANS: dict[str, Loss] = {
    "product": lambda r, f: r.sigmoid().mean() * f.sigmoid().mean(),
    "relative": lambda r, f: F.softplus(f.mean() - r.mean()),
}
MEETING: dict[str, Any] = {
    "looked up": lambda r, f: r + f[(r[:, 0] > 0).long()],
    "attended": lambda r, f: r + (r @ f.T).softmax(-1) @ f,
    "a mean": lambda r, f: r + f.mean(0),
    "joined": lambda r, f: torch.cat([r, f]),
}
FORMS = {
    f"{name}, {'own' if own else 'a function'}, {many} of noise": (loss, own, many)
    for name, loss in LOSSES.items()
    for own in (False, True)
    for many in (ROWS, ROWS // 2)
    if many == ROWS or name != "sums"
}


def arguments(own: bool, many: int = ROWS) -> list[tuple[Tensor, ...]]:
    labels = [] if own else [torch.zeros(ROWS)]
    return [(draw(k, ROWS, WIDTH), draw(k + 5, many, NOISE), *labels) for k in range(2)]


def of_both(loss: Loss) -> Callable[[tuple[Tensor, Tensor], Tensor], Tensor]:
    return lambda found, labels: loss(*found)


@one_of(2)
@pytest.mark.parametrize(("loss", "own", "many"), every(17, FORMS.values(), FORMS))
def test_a_gan_trains_as_in_plain_pytorch(loss: Loss, own: bool, many: int) -> None:
    model, batches = Gan(loss), arguments(own, many)
    losses = plain_losses(SGD(model.parameters()), batches, lambda *batch: model(*batch[:2]))
    strategy = [Place(where(), [0]), Split("MB", 4)]

    given = (Gan(loss), None) if own else (Gan(), of_both(loss))
    found = rehearse(*given, strategy, batches, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            found.parameters[name], parameter.detach(), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize(("name", "own"), levels_of(NO_MEANS, [False, True]))
def test_a_loss_that_is_no_mean_of_both_is_refused(name: str, own: bool) -> None:
    loss = NO_MEANS[name]
    given = (Gan(loss), None) if own else (Gan(), of_both(loss))

    with pytest.raises(
        InputError,
        match="cannot see how it reduces|microbatches would not add up|is no mean or sum over rows",
    ):
        rehearse(*given, [Place(where(), [0]), Split("MB", 2)], arguments(own))


@pytest.mark.parametrize("name", every(2, MEETING))
def test_inputs_that_meet_before_are_to_be_named(name: str) -> None:
    model = Gan(LOSSES["logistic"], MEETING[name])

    with pytest.raises(InputError, match="sizes do not say which tensors have the batch"):
        rehearse(model, None, [Place(where(), [0]), Split("MB", 2)], arguments(True))
