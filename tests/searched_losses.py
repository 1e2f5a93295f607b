"""Heads and losses for a search by `job/test_model_search.py`: what models return, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from searched_blocks import D
from torch import Tensor, nn
from torch.nn import functional as F

C = 4  # classes
Head = Callable[["Net", Tensor, Tensor], Any]  # of the net, its last hidden tensor and its first
Loss = Callable[[Any, dict[str, Tensor]], Tensor]
Net = Any
HEADS: dict[str, tuple[Head, list[Loss]]] = {}
LOGITS: list[Loss] = []  # losses of plain logits [rows, T, C]


def head(*losses: Loss) -> Callable[[Head], Head]:
    def add(function: Head) -> Head:
        HEADS[function.__name__] = function, list(losses) or LOGITS
        return function

    return add


def loss(function: Any) -> Any:
    LOGITS.append(function)
    return function


def entropy(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())


def every_label(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), given["labels"].clamp(min=0).flatten())


# Losses of logits


@loss
def field(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The log-likelihood of a linear chain, by the forward algorithm."""
    labels = given["labels"].clamp(min=0)
    alpha, path = logits[:, 0], logits[:, 0].gather(1, labels[:, :1])[:, 0]
    for t in range(1, logits.shape[1]):
        moves = alpha[:, :, None] + torch.linspace(-1, 1, C, dtype=logits.dtype)
        alpha = moves.logsumexp(1) + logits[:, t]
        path = path + logits[:, t].gather(1, labels[:, t, None])[:, 0]
    return (alpha.logsumexp(1) - path).mean()


@loss
def time_warped(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    target = F.one_hot(given["labels"].clamp(min=0), C).to(logits.dtype)
    cost = torch.cdist(logits, target).square()
    rows = [[cost[:, 0, 0]]]
    for i in range(cost.shape[1]):
        rows += [[]] if i else []
        for j in range(int(i == 0), 3):
            near = [
                rows[a][b] for a, b in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if min(a, b) >= 0
            ]
            rows[i].append(cost[:, i, j] - torch.logsumexp(-torch.stack(near), 0))
    return rows[-1][-1].mean() / 10


@loss
def pinball(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    levels = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=logits.dtype)
    apart = given["value"][:, None, None] - logits
    return torch.maximum(levels * apart, (levels - 1) * apart).sum(-1).mean()


@loss
def gaussian(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    mean, spread = logits[..., 0], F.softplus(logits[..., 1]) + 1e-2
    return F.gaussian_nll_loss(mean, given["value"][:, None].expand_as(mean), spread)


@loss
def ordinal(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    above = (given["labels"][..., None] > torch.arange(C)).to(logits.dtype)
    each = F.binary_cross_entropy_with_logits(logits, above, reduction="none")
    return each.sum(-1).mean(1).mean(0)


@loss
def listwise(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    scores, target = logits.mean(-1), given["labels"].to(logits.dtype).softmax(1)
    return -(target * scores.log_softmax(1)).sum(1).mean()


@loss
def weighted_rows(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    each = logits.square().mean((1, 2))
    return (each * given["weight"]).sum() / given["weight"].sum()


@loss
def weights_in_mean(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    return (logits.log_softmax(-1)[..., 0].mean(1) * given["weight"]).mean().neg()


@loss
def list_of_rows(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    found = [
        F.cross_entropy(a, b) for a, b in zip(logits, given["labels"].clamp(min=0), strict=True)
    ]
    return sum(found) / len(found)


@loss
def stacked_rows(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    found = [row.square().mean() for row in logits.unbind()]
    return torch.stack(found).mean()


@loss
def ignored(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.permute(0, 2, 1), given["labels"])


@loss
def shifted_mask(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    labels = given["labels"][:, 1:]
    counts = labels.ge(0)
    each = F.cross_entropy(logits[:, :-1].mT, labels.clamp_min(0), reduction="none")
    return each.masked_fill(~counts, 0).sum() / counts.sum()


@loss
def two_masks(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    one, other = given["labels"] >= 0, given["labels"] > 1
    size = logits.square().mean(-1)
    return (size * one).sum() / one.sum() + (size * other).sum() / other.sum().clamp(min=1)


@loss
def overlap_of_rows(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    p, hot = logits.softmax(-1), F.one_hot(given["labels"].clamp(min=0), C)
    both, any_of = (p * hot).sum((1, 2)), (p + hot - p * hot).sum((1, 2))
    return 1 - (both / any_of).mean()


@loss
def triplets(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.triplet_margin_loss(logits[:, 0], logits[:, 1], logits[:, 2], margin=0.5)


@loss
def cosine(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    sign = torch.where(given["value"] > 0, 1, -1)
    return F.cosine_embedding_loss(logits[:, 0], logits[:, -1], sign)


@loss
def correlation(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    a, b = logits.mean((1, 2)), given["value"]
    a, b = a - a.mean(), b - b.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-3)


@loss
def hazards(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Cox: each row against all that live longer."""
    risk, order = logits.mean((1, 2)), given["value"].argsort(descending=True)
    return (risk[order].logcumsumexp(0) - risk[order]).mean()


@loss
def decorrelated(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    z = logits.mean(1)
    covariance = (z - z.mean(0)).T @ (z - z.mean(0)) / (len(z) - 1)
    return covariance.fill_diagonal_(0).square().sum() + entropy(logits, given)


@loss
def hardest(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    each = F.cross_entropy(logits.mT, given["labels"].clamp(min=0), reduction="none")
    return each.flatten().topk(3).values.mean()


@loss
def hardest_of_row(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    each = F.cross_entropy(logits.mT, given["labels"].clamp(min=0), reduction="none")
    return each.topk(2, dim=1).values.mean()


@loss
def summed_by_rows(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    return logits.square().sum() / logits.size(0) + 0.1 * logits.abs().mean(0).sum()


@loss
def plain_sum(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    return (logits - given["value"][:, None, None]).abs().sum() * 1e-2


class Centred(nn.Module):
    """A loss module with a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.linspace(-1, 1, C))

    def forward(self, logits: Tensor, given: dict[str, Tensor]) -> Tensor:
        return F.smooth_l1_loss(logits, self.centre.to(logits.dtype).expand_as(logits))


@dataclass
class Scaled:
    scale: float

    def __call__(self, logits: Tensor, given: dict[str, Tensor]) -> Tensor:
        return self.scale * entropy(logits, given)

    def method(self, logits: Tensor, given: dict[str, Tensor]) -> Tensor:
        return self.scale * ordinal(logits, given)


LOGITS += [Centred(), SCALED := Scaled(0.3), Scaled(0.7).method, ENTROPY := partial(entropy)]

Counts = Callable[[dict[str, Tensor]], Tensor]
SUMS = (plain_sum,)  # over rows: microbatches are added up
COUNTS: dict[Any, Counts] = {  # what a loss divides by, if these are not its rows
    **dict.fromkeys(
        map(id, (ignored, SCALED, ENTROPY)), lambda given: (given["labels"] >= 0).sum()
    ),
    id(shifted_mask): lambda given: (given["labels"][:, 1:] >= 0).sum(),
    id(weighted_rows): lambda given: given["weight"].sum(),
}


# What models return, and losses of it


@head()
def plain(net: Net, h: Tensor, first: Tensor) -> Tensor:
    return net.out(h)


@head()
def mixture_of_softmaxes(net: Net, h: Tensor, first: Tensor) -> Tensor:
    parts = net.out(torch.stack([h, h * net.gate, h.roll(1, -1)], 2)).softmax(-1)
    return ((h @ net.mix).softmax(-1)[..., None] * parts).sum(2).log()


class Found(NamedTuple):
    logits: Tensor
    extra: Any


def with_extra(found: Any, given: dict[str, Tensor]) -> Tensor:
    logits, extra = found if isinstance(found, Found) else (found["logits"], found["extra"])
    return every_label(logits, given) + 0.1 * extra.mean()


@head(with_extra)
def volume(net: Net, h: Tensor, first: Tensor) -> Found:
    """A flow's log-determinant: one number for each row."""
    return Found(net.out(h), torch.tanh(h).square().sum((1, 2)))


@head(with_extra)
def named(net: Net, h: Tensor, first: Tensor) -> dict[str, Tensor]:
    return {"logits": net.out(h), "extra": first.square(), "unused": h.mean()}


def exits(found: list[Tensor], given: dict[str, Tensor]) -> Tensor:
    return sum(0.5**k * every_label(one, given) for k, one in enumerate(found))


@head(exits)
def several_exits(net: Net, h: Tensor, first: Tensor) -> list[Tensor]:
    return [net.out(h), net.out(first), net.out(h * net.gate)]


def preference(found: tuple[Tensor, Tensor], given: dict[str, Tensor]) -> Tensor:
    better, worse = (one.log_softmax(-1)[..., 0].sum(-1) for one in found)
    return -F.logsigmoid(0.3 * (better - worse)).mean()


@head(preference)
def pairs(net: Net, h: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Two answers in one call, as for DPO."""
    one, other = net.out(torch.cat([h, first])).tensor_split(2)
    return one, other


def distilled(found: tuple[Tensor, Tensor], given: dict[str, Tensor]) -> Tensor:
    student, teacher = (one.log_softmax(-1) for one in found)
    return F.kl_div(student, teacher.detach(), reduction="batchmean", log_target=True)


@head(distilled)
def with_teacher(net: Net, h: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        wanted = net.out(first)
    return net.out(h), wanted


EXTRAS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.square().mean(),
    "over_rows": lambda h: h.abs().sum() / h.shape[0],
    "sum": lambda h: h.square().sum(),
    "loop_of_sums": lambda h: sum(row.square().sum() for row in h),
    "loop_of_means": lambda h: sum(row.square().mean() for row in h) / len(h),
    "largest": lambda h: h.max(),
    "variance": lambda h: h.var(),
    "balance": lambda h: D * (h.softmax(-1).mean((0, 1)) * h.sigmoid().mean((0, 1))).sum(),
    "root": lambda h: h.square().mean().sqrt(),
    "masked": lambda h: h[..., 0].relu().sum() / (h[..., 0] > 0).sum().clamp(min=1),
    "norms": lambda h: h.norm(dim=-1).mean(),
    "count": lambda h: (h > 0).sum().to(h.dtype),
    "spectrum": lambda h: torch.linalg.matrix_norm(h.flatten(0, 1), 2),
    "logarithm": lambda h: h.exp().mean().log(),
    "constant": lambda h: torch.full((), 2.0, dtype=h.dtype),
    "by_python": lambda h: h.mean() * len(h),
}


def side_output(extra: Callable[[Tensor], Tensor]) -> Head:
    return lambda net, h, first: Found(net.out(h), extra(h))


for _name, _extra in EXTRAS.items():
    HEADS[f"side output {_name}"] = side_output(_extra), [with_extra]


def rows_meet(mix: Callable[[Tensor], Tensor]) -> Head:
    return lambda net, h, first: net.out(mix(h))


MEETING: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda h: h * h.shape[0],
    "root_of_numbers": lambda h: h / len(h) ** 0.5,
    "number_in_sum": lambda h: h + 0.1 * h.size(0),
    "centred": lambda h: h - h.mean(0, keepdim=True),
    "other_rows": lambda h: h + h.roll(1, 0),
    "attention": lambda h: (h.transpose(0, 1) @ h.permute(1, 2, 0)).softmax(-1).matmul(
        h.transpose(0, 1)
    ).transpose(0, 1),
    "first_row": lambda h: h - h[:1],
    "reversed": lambda h: h + h.flip(0),
    "whitened": lambda h: h / h.flatten(0, 1).std(0),
    "sorted_rows": lambda h: h.sort(0).values,
    "positions": lambda h: h + torch.arange(len(h), dtype=h.dtype)[:, None, None],
    "mixed_up": lambda h: 0.7 * h + 0.3 * h[torch.arange(len(h)).flip(0)],
    "filled": lambda h: h + h.new_full((len(h), 1, 1), float(len(h))),
    "maximum": lambda h: h / h.abs().max(),
}  # fmt: skip
for _name, _mix in MEETING.items():
    HEADS[f"rows meet {_name}"] = rows_meet(_mix), [every_label]
