"""Models whose rows meet only on later batches: the first one has no padding, or small numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, rehearse, where
from piper.errors import InputError

ROWS, TOKENS, WIDTH = 4, 3, 5
Masked = Callable[[Tensor, Tensor], Tensor]  # of rows and their mask
Mix = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
SGD = partial(torch.optim.SGD, lr=0.1)

MEETING: dict[str, Masked] = {
    "turned": lambda h, m: h * m.flip(0)[..., None],
    "rolled": lambda h, m: h * m.roll(1, 0)[..., None],
    "first row": lambda h, m: h * m[0][:, None],
    "last row": lambda h, m: h.masked_fill(m[-1:, :, None] == 0, 0.0),
    "tokens of any row": lambda h, m: h * (m != 0).any(0)[:, None],
    "tokens of all rows": lambda h, m: h * (1 + (m != 0).all(0)[:, None]),
    "without padding": lambda h, m: torch.where((m != 0).all(), h, 2 * h),
    "longest row": lambda h, m: h * (torch.arange(TOKENS) < (m != 0).sum(1).max())[:, None],
    "a share": lambda h, m: h * m.to(h.dtype).mean(),
    "same rows": lambda h, m: h * (m[:, None] == m[None]).all(-1).sum(1)[:, None, None],
    "sorted": lambda h, m: h[(m != 0).sum(1).argsort(stable=True)],
    "attention": lambda h, m: F.scaled_dot_product_attention(
        h, h, h, attn_mask=(m != 0).any(0) | torch.eye(TOKENS, dtype=torch.bool)
    ),
}
APART: dict[str, Masked] = {
    "masked": lambda h, m: h * m[..., None],
    "own share": lambda h, m: h * m.to(h.dtype).mean(1)[:, None, None],
    "own length": lambda h, m: (
        (h * m[..., None]).sum(1, keepdim=True) / (m != 0).sum(1).clamp(min=1)[:, None, None] + h
    ),
    "attention": lambda h, m: F.scaled_dot_product_attention(
        h, h, h, attn_mask=(m != 0)[:, None] | torch.eye(TOKENS, dtype=torch.bool)
    ),
    "last token": lambda h, m: h + h[torch.arange(len(h)), (m != 0).sum(1) - 1][:, None],
    "causal": lambda h, m: (
        (
            (h @ h.mT).masked_fill(
                ~((m != 0)[:, None] & torch.ones(TOKENS, TOKENS).tril().bool()), -1e9
            )
        ).softmax(-1)
        @ h
    ),
    "mask if any padding": lambda h, m: torch.where((m == 0).any(), h * (m != 0)[..., None], h),
    "no mask without padding": lambda h, m: torch.where((m != 0).all(), h, h * (m != 0)[..., None]),
    "same for all": lambda h, m: h * torch.ones_like(m)[0][:, None],
}
KINDS = (torch.bool, torch.int64, torch.float32)


class Net(nn.Module):
    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), mix

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        return self.last(self.mix(self.first(x), *masks))


def trained(model: nn.Module, *masks: Tensor, loss: Loss = F.mse_loss, **options: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, TOKENS, WIDTH, generator=draw).clamp(-1, 1)
    strategy = [Place(where(), [0]), Split("MB", 2)]
    rehearse(model, loss, strategy, [(x, *masks, y)], optimizer=SGD, whole=[], **options)


@pytest.fixture(autouse=True)
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "piper")
    return caplog


FORMS = {f"{name}, {kind}": (mix, kind) for name, mix in MEETING.items() for kind in KINDS}
CLEAN = {f"{name}, {kind}": (mix, kind) for name, mix in APART.items() for kind in KINDS}


@one_of(2)
@pytest.mark.parametrize(("mix", "kind"), every(9, FORMS.values(), FORMS))
def test_a_mask_without_padding_hides_nothing(
    mix: Masked, kind: torch.dtype, warned: pytest.LogCaptureFixture
) -> None:
    trained(Net(mix), torch.ones(ROWS, TOKENS, dtype=kind))

    assert "rows of the batch meet at test_later_batches.py" in warned.text


@one_of(2)
@pytest.mark.parametrize(("mix", "kind"), every(7, CLEAN.values(), CLEAN))
def test_rows_with_their_own_masks_are_left_in_peace(
    mix: Masked, kind: torch.dtype, warned: pytest.LogCaptureFixture
) -> None:
    trained(Net(mix), torch.ones(ROWS, TOKENS, dtype=kind))

    assert not warned.records


GUARDS: dict[str, Mix] = {  # numbers like those of the first batch never show what they do
    "largest": lambda h: h / h.abs().amax().clamp(min=1e3),
    "relu of a mean": lambda h: h - F.relu(h.mean() - 1e3),
    "any": lambda h: torch.where((h.abs() > 1e3).any(), 0.5 * h, h),
    "not finite": lambda h: torch.where(h.isfinite().all(), h, torch.zeros_like(h)),
    "how many": lambda h: torch.where((h > 1e3).sum() > 2, 0.5 * h, h),
    "a norm": lambda h: h * (1e6 / h.norm()).clamp(max=1.0),
    "spread": lambda h: torch.where(h.std() < 1e-6, h + 1, h),
    "close to zero": lambda h: torch.where(h.mean().abs() < 1e-9, h + 1, h),
    "first row": lambda h: h + F.relu(h[0] - 1e3),
    "rows that differ": lambda h: h + F.relu((h[1:] - h[:1]).abs().amax(0) - 1e3),
    "products": lambda h: h + F.relu(h.flatten(1).T @ h.flatten(1) - 1e4).sum(),
    "classes": lambda h: h + F.relu(h.new_zeros(WIDTH).index_add(0, *scores(h)) - 1e4),
    "median": lambda h: h * torch.where(h.median() > 1e3, 2.0, 1.0),
    "in place": lambda h: h + h.new_zeros(WIDTH).add_(h.sum((0, 1))).clamp(min=1e4),
}


def scores(h: Tensor) -> tuple[Tensor, Tensor]:
    return h.argmax(-1).flatten(), h.amax(-1).flatten()


HARMLESS: dict[str, Mix] = {
    "stable softmax": lambda h: (e := (h - h.amax()).exp()) / e.sum(-1, keepdim=True),
    "scaled and back": lambda h: (h / h.abs().amax()) * h.abs().amax(),
    "of each row": lambda h: h / h.abs().amax((1, 2), keepdim=True).clamp(min=1e3),
    "of constants": lambda h: h * torch.ones(len(h), 1).mean().clamp(min=0.5),
    "one of equal rows": lambda h: h + torch.arange(TOKENS).expand(len(h), -1)[0][:, None],
    "guarded by rows": lambda h: torch.where((h > 1e3).any(-1, keepdim=True), 2 * h, h),
    "experts": lambda h: (
        h * (h.argmax(-1).flatten().bincount(minlength=WIDTH) > -1)
    ),  # counts for each of several things
}


@pytest.mark.parametrize("mix", every(8, GUARDS.values(), GUARDS))
def test_a_guard_over_all_rows_is_named(mix: Mix, warned: pytest.LogCaptureFixture) -> None:
    trained(Net(mix))

    at = mix.__code__.co_firstlineno
    assert f"rows of the batch meet at test_later_batches.py:{at}" in warned.text


@pytest.mark.parametrize("mix", every(5, HARMLESS.values(), HARMLESS))
def test_values_of_all_rows_that_change_nothing_are_left_in_peace(
    mix: Mix, warned: pytest.LogCaptureFixture
) -> None:
    trained(Net(mix))

    assert not warned.records


FLOORS: dict[str, Loss] = {
    "flood": lambda o, y: (F.mse_loss(o, y) - 1e-4).abs() + 1e-4,
    "floor": lambda o, y: torch.maximum(F.mse_loss(o, y), torch.tensor(1e-4)),
    "ceiling": lambda o, y: F.mse_loss(o, y).clamp(max=1e4),
    "margin": lambda o, y: F.relu(F.mse_loss(o, y) - 1e-4),
    "one of two": lambda o, y: torch.where(y.abs().amax() > 1e3, 0.5, 1.0) * F.mse_loss(o, y),
    "any": lambda o, y: torch.where((y > 1e3).any(), 0.5, 1.0) * F.mse_loss(o, y),
    "normalised": lambda o, y: F.mse_loss(o, y) / y.abs().amax().clamp(min=1e3),
    "two terms": lambda o, y: F.mse_loss(o, y) + F.relu(o.mean() - 1e3),
    "the larger": lambda o, y: torch.stack([F.mse_loss(o, y), 1e-6 * o.square().mean()]).amax(),
}
MEANS: dict[str, Loss] = {
    "no rule, but a mean": lambda o, y: torch.cat([(o - y).square().flatten()[None]] * 2).mean(),
    "two terms": lambda o, y: F.mse_loss(o, y).exp().log() * 0 + F.mse_loss(o, y) + o.abs().mean(),
    "clamped by rows": lambda o, y: F.relu((o - y).square().mean((1, 2)) - 1e-4).mean(),
    "in a loop": lambda o, y: torch.stack(
        [F.mse_loss(a, b) for a, b in zip(o, y, strict=True)]
    ).mean(),
}


@one_of(2)
@pytest.mark.parametrize("loss", every(3, FLOORS.values(), FLOORS))
def test_a_loss_that_is_a_mean_on_some_data_only_is_refused(loss: Loss) -> None:
    said = r"it is no mean or sum over rows.*test_later_batches.py:\d+|would not add up"
    with pytest.raises(InputError, match=said):
        trained(Net(torch.tanh), loss=loss)


@pytest.mark.parametrize("loss", every(2, MEANS.values(), MEANS))
def test_means_are_left_in_peace(loss: Loss, warned: pytest.LogCaptureFixture) -> None:
    trained(Net(torch.tanh), loss=loss)

    assert not warned.records


def test_one_who_says_what_microbatches_weigh_is_believed(warned: pytest.LogCaptureFixture) -> None:
    trained(Net(torch.tanh), loss=FLOORS["flood"], loss_weight=lambda *microbatch: 1)

    assert not warned.records


def test_what_a_trial_shows_is_said_once_for_all_lengths(warned: pytest.LogCaptureFixture) -> None:
    batches = [tuple(torch.randn(2, ROWS, tokens, WIDTH)) for tokens in (3, 4, 5)]
    strategy = [Place(where(), [0]), Split("MB", 2)]

    given = Net(GUARDS["largest"]), F.mse_loss, strategy
    trainer = Trainer(*given, example=batches[0], optimizer=SGD, whole=[])
    for batch in batches:
        trainer.step(*batch)
    trainer.close()

    assert len(warned.records) == 1
