"""A proof about a loss holds: with its weights, microbatches add up to the batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from draws import levels_of, one_of
from loss_forms import CLASSES, PARTS, ROWS, Loss, difference, form_of
from torch import Tensor
from torch.nn import functional as F

WEIGHT = torch.rand(CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ce(o: Any, y: Any, **options: Any) -> Tensor:
    return F.cross_entropy(o["tokens"].flatten(0, 1), y["labels"].flatten(), **options)


def masked(o: Any, y: Any) -> Tensor:
    return (o["x"] - y["y"]).square() * y["mask"]


def ctc(o: Any, y: Any, inputs: Any, lengths: Any, **options: Any) -> Tensor:
    given = o["tokens"].transpose(0, 1).log_softmax(-1), y["labels"][:, :2].clamp(min=1)
    return F.ctc_loss(*given, inputs, lengths, **options)


PROVED: dict[str, Loss] = {
    "ctc": lambda o, y: ctc(o, y, y["labels"][:, 2].clamp(min=5), y["k"] % 2 + 1),
    "ctc, lists": lambda o, y: ctc(o, y, (6,) * len(o["x"]), [2] * len(o["x"]), reduction="sum"),
    "ctc over rows": lambda o, y: (
        ctc(o, y, torch.full((len(o["x"]),), 6), y["k"] % 2 + 1, reduction="none").sum()
        / len(y["k"])
    ),
    "ctc, sum over rows": lambda o, y: (
        ctc(o, y, [5] * len(o["x"]), [1] * len(o["x"]), reduction="sum", zero_infinity=True)
        / len(y["k"])
    ),
    "cross entropy": ce,
    "class weights": lambda o, y: ce(o, y, weight=WEIGHT),
    "smoothed": lambda o, y: ce(o, y, label_smoothing=0.1),
    "shifted": lambda o, y: F.cross_entropy(
        o["tokens"][:, :-1].reshape(-1, CLASSES), y["labels"][:, 1:].reshape(-1)
    ),
    "padded": lambda o, y: F.cross_entropy(
        o["tokens"].transpose(1, 2), F.pad(y["labels"], (0, 1), value=-100)[:, 1:]
    ),
    "sum": lambda o, y: ce(o, y, reduction="sum"),
    "sum over rows": lambda o, y: (o["x"] - y["y"]).square().sum() / len(o["x"]),
    "sum times": lambda o, y: (o["x"] - y["y"]).square().sum() * (1 / o["x"].numel()),
    "sum over seven": lambda o, y: (o["x"] - y["y"]).square().sum() / 7,
    "sum over four": lambda o, y: (o["x"] - y["y"]).square().sum() / ROWS,
    "masked": lambda o, y: masked(o, y).sum() / y["mask"].sum(),
    "masked, at least 1": lambda o, y: masked(o, y).sum() / y["mask"].sum().clamp(min=1),
    "masked, eps": lambda o, y: masked(o, y).sum() / (y["mask"].sum() + 0.5),
    "masked, root": lambda o, y: masked(o, y).sum() / y["mask"].sum().sqrt(),
    "means": lambda o, y: masked(o, y).mean() / y["mask"].double().mean(),
    "divided first": lambda o, y: (masked(o, y) / y["mask"].sum()).sum(),
    "chosen": lambda o, y: (o["x"][y["mask"]] - y["y"][y["mask"]]).abs().mean(),
    "rows weighed": lambda o, y: (
        (F.cross_entropy(o["x"], y["k"], reduction="none") * y["weight"])
        .sum()
        .div(y["weight"].sum())
    ),
    "picked": lambda o, y: -o["x"].log_softmax(-1)[torch.arange(len(o["x"])), y["k"]].mean(),
    "gathered": lambda o, y: -o["x"].log_softmax(-1).gather(1, y["k"][:, None]).squeeze(1).mean(),
    "one hot": lambda o, y: -(F.one_hot(y["k"], CLASSES) * o["x"].log_softmax(-1)).sum(-1).mean(),
    "two terms": lambda o, y: F.cross_entropy(o["x"], y["k"]) + 0.1 * F.mse_loss(o["x"], y["y"]),
    "divergence": lambda o, y: F.kl_div(
        o["x"].log_softmax(-1), y["y"].softmax(-1), reduction="batchmean"
    ),
    "focal": lambda o, y: (
        (1 - torch.exp(-F.cross_entropy(o["x"], y["k"], reduction="none"))).pow(2).mean()
    ),
    "cosine": lambda o, y: (1 - F.cosine_similarity(o["x"], y["y"])).mean(),
    "triplet": lambda o, y: F.triplet_margin_loss(o["x"], y["y"], y["y"].roll(1, 1)),
    "rows of a mask": lambda o, y: (masked(o, y).sum(1) / y["mask"].sum(1).clamp(min=1)).mean(),
    "a constant more": lambda o, y: F.huber_loss(o["x"], y["y"]) + WEIGHT.square().sum(),
    "letters": lambda o, y: torch.einsum("bi,bi->", o["x"], y["y"]) / len(o["x"]),
    "letters of rows": lambda o, y: torch.einsum("bti,bi->tb", o["tokens"], y["y"]).abs().mean(),
    "x.T @ y": lambda o, y: (o["x"].T @ y["y"]).mean(),
    "inner": lambda o, y: o["x"].flatten() @ y["y"].flatten(),
    "projected": lambda o, y: F.mse_loss(o["x"] @ WEIGHT, y["y"] @ WEIGHT),
}
NOT_PROVED: dict[str, Loss] = {
    "ctc, other rows": lambda o, y: ctc(o, y, (6,) * len(o["x"]), y["k"].flip(0) % 2),
    "ctc, tokens": lambda o, y: F.ctc_loss(
        o["tokens"].log_softmax(-1),
        y["labels"][0].clamp(min=1)[None].expand(6, -1),
        (4,) * 6,
        (2,) * 6,
    ),
    "root": lambda o, y: F.mse_loss(o["x"], y["y"]).sqrt(),
    "balanced": lambda o, y: F.binary_cross_entropy_with_logits(
        o["x"], y["mask"].double(), pos_weight=(~y["mask"]).sum() / y["mask"].sum()
    ),
    "broadcast": lambda o, y: F.mse_loss(o["x"][:, :1], y["weight"]),
    "regulariser": lambda o, y: F.mse_loss(o["x"], y["y"]) + 1e-6 * o["x"].mean(0).square().sum(),
    "contrast": lambda o, y: F.cross_entropy(o["x"] @ y["y"].T, torch.arange(len(o["x"]))),
    "overlap": lambda o, y: masked(o, y).sum() / (o["x"].sigmoid().sum() + y["mask"].sum()),
    "letters of other rows": lambda o, y: torch.einsum("bi,ci->bc", o["x"], y["y"]).abs().mean(),
    "x @ y.T": lambda o, y: (o["x"] @ y["y"].T).abs().mean(),
    "neighbours": lambda o, y: F.mse_loss(o["x"][1:], y["y"][:-1]),
    "every other": lambda o, y: F.mse_loss(o["x"][::2], y["y"][::2]),
    "reversed": lambda o, y: F.mse_loss(o["x"].flip(0), y["y"]),
    "sorted": lambda o, y: F.mse_loss(o["x"].sort(0).values, y["y"]),
    "normalised": lambda o, y: F.mse_loss((o["x"] - o["x"].mean(0)) / o["x"].std(0), y["y"]),
    "scrambled": lambda o, y: o["x"].reshape(CLASSES, -1).square().sum(0).sqrt().mean(),
    "sum and mean": lambda o, y: o["x"].square().mean() + y["y"].sum(),
    "product": lambda o, y: o["x"].mean() * o["tokens"].mean(),
    "largest": lambda o, y: (o["x"] - y["y"]).abs().max(),
    "numbered": lambda o, y: (o["x"].sum(1) * torch.arange(len(o["x"]))).mean(),
    "a constant beside a function of a sum": lambda o, y: (
        o["x"].square().sum() / (y["weight"].sum() + 1) + 3
    ),
    "own labels": lambda o, y: F.cross_entropy(
        o["x"], torch.where(o["x"][:, 0] > 0, o["x"].argmax(1), -100)
    ),
}


SIZES = [PARTS, ROWS * PARTS]  # microbatches of several rows, and of one


@one_of(3)
@pytest.mark.parametrize(("name", "parts"), levels_of(PROVED, SIZES, nth=3))
def test_what_is_proved_holds(name: str, parts: int) -> None:
    loss = PROVED[name]
    form = form_of(loss, parts)

    assert form.kind is not None
    if len(form.counts) + form.even < 2:  # else only batches in which everything counts
        assert max(difference(loss, form, seed, parts) for seed in range(1, 4)) < 1e-12


@pytest.mark.parametrize(("name", "parts"), levels_of(NOT_PROVED, SIZES, nth=2))
def test_what_does_not_hold_is_not_proved(name: str, parts: int) -> None:
    assert form_of(NOT_PROVED[name], parts).kind is None


def drawn(rng: random.Random) -> Loss:
    """A random loss: elements, a step that may mix rows, a reduction, a divisor and an end."""
    element = rng.choice([
        lambda o, y: (o["x"] - y["y"]).square(),
        lambda o, y: F.softplus(o["x"]) * y["weight"][:, None],
        lambda o, y: o["x"].log_softmax(rng_dim) * y["y"], lambda o, y: o["tokens"].sum(1).abs(),
        lambda o, y: F.cross_entropy(o["tokens"].transpose(1, 2), y["labels"], reduction="none"),
        lambda o, y: o["x"].cumsum(rng_dim).tanh(),
        lambda o, y: o["x"] - o["x"].mean(rng_dim, True),
    ])  # fmt: skip
    rng_dim = rng.choice([0, 1])
    shaping = rng.choice([
        lambda e: e, lambda e: e.T, lambda e: e.flatten(), lambda e: e[:, 1:], lambda e: e[1:],
        lambda e: e.reshape(-1, len(e)), lambda e: e.unsqueeze(0), lambda e: e.sum(rng_dim).abs(),
    ])  # fmt: skip
    reduction = rng.choice([Tensor.sum, Tensor.mean, lambda e: e.mean(0).sum()] * 2 + [Tensor.norm])
    divisor = rng.choice([
        lambda o, y: 1, lambda o, y: len(o["x"]), lambda o, y: y["mask"].sum(),
        lambda o, y: y["weight"].sum() + 1, lambda o, y: 1 / len(o["x"]), lambda o, y: ROWS,
        lambda o, y: y["weight"].mean(), lambda o, y: y["mask"][:, 0].sum() * y["mask"].sum(),
    ])  # fmt: skip
    end = rng.choice([*[lambda v: v] * 4, lambda v: v * 2 + 3, torch.exp, Tensor.square])
    return lambda o, y: end(reduction(shaping(element(o, y))) / divisor(o, y))


def assert_drawn(seeds: range) -> int:
    proved = 0
    for seed in seeds:
        loss, parts = drawn(random.Random(seed)), (PARTS, ROWS * PARTS)[seed % 2]
        form = form_of(loss, parts)
        if form.kind is not None:
            proved += 1
            assert difference(loss, form, seed, parts) < 1e-11, seed
    return proved


def test_proofs_of_random_losses_hold() -> None:
    assert assert_drawn(range(20)) > 1


@pytest.mark.soak
def test_proofs_of_many_random_losses_hold() -> None:
    assert assert_drawn(range(20, 1000)) > 100
