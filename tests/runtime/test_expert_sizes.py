"""Experts whose code writes down how many rows or experts there are: shares have other numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.backends import opt_einsum
from torch.nn import functional as F

from piper import Place, Replicate, Shard, Split, annotate, rehearse, where
from piper.errors import CaptureError
from piper.models.grouped import grouped_mm

ROWS, STEPS = 8, 3
SGD = partial(torch.optim.SGD, lr=0.2)
Inside = Callable[[Tensor, Tensor, Tensor], Tensor]


def ids_of(counts: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(counts.shape[0]), counts)


def by_ids(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grouped_mm(rows, weight, counts) + weight.mean((1, 2))[ids_of(counts)].unsqueeze(1)


def repeated(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    ids = torch.arange(len(counts)).repeat_interleave(counts, output_size=rows.shape[0])
    return torch.bmm(rows.unsqueeze(1), weight[ids]).squeeze(1)


def one_hot(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    hot = F.one_hot(ids_of(counts), counts.shape[0]).to(rows.dtype)
    return torch.einsum("te,td,edf->tf", hot, rows, weight)


def searched(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    ids = torch.searchsorted(counts.cumsum(0), torch.arange(rows.shape[0]), right=True)
    return torch.bmm(rows.unsqueeze(1), weight[ids]).squeeze(1)


def masked(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    ends, at = counts.cumsum(0), torch.arange(rows.shape[0]).unsqueeze(1)
    mine = (at >= ends - counts) & (at < ends)
    return (torch.einsum("td,edf->tef", rows, weight) * mine.unsqueeze(-1)).sum(1)


def viewed(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    n, d = rows.shape
    return (rows.view(n, 1, d) @ weight[ids_of(counts)].view(n, d, d)).view(n, d)


def filled(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    bias = torch.zeros(len(counts), rows.shape[1], dtype=rows.dtype) + weight.mean(1)
    return grouped_mm(rows, weight, counts) + bias[ids_of(counts)]


INSIDE: list[Inside] = [by_ids, repeated, one_hot, searched, masked, viewed, filled]


class Net(nn.Module):
    """A dense layer, a router without gradients, and experts that do what the test says."""

    def __init__(self, inside: Inside, experts: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(experts)
        self.inside = inside
        self.dense = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(experts, width, width))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x))
        expert = x.sum(-1).detach().mul(10).long() % self.weight.shape[0]
        order = expert.argsort(stable=True)
        counts = expert.new_zeros(self.weight.shape[0])
        counts = counts.scatter_add(0, expert, torch.ones_like(expert))
        rows = x[order]
        with annotate("EP"):
            rows = self.inside(rows, self.weight, counts)
        return rows[order.argsort()] * 1.0


def batches(width: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(width)
    shape = (4 * ROWS, width)
    made = partial(torch.randn, *shape, generator=draw, dtype=torch.float64)
    return [(made(), made()) for _ in range(STEPS)]


def plain(model: Net, width: int) -> list[float]:
    optimizer, losses = SGD(model.parameters()), []
    for x, y in batches(width):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# A width that is the number of experts, or of rows, reads like one of them.
SIZES = [(4, 6), (6, 6), (4, 8), (8, 6)]


@one_of(2)
@pytest.mark.parametrize(("inside", "sizes"), every(20, product(INSIDE, SIZES)))
def test_experts_that_count_themselves_train_as_on_one_device(
    inside: Inside, sizes: tuple[int, int]
) -> None:
    experts, width = sizes
    both = [0, 1]
    strategy = [
        Place(where(), both), Replicate(where(), both), Shard(where(EP=0), both), Split("MB", 2),
    ]  # fmt: skip
    model = Net(inside, experts, width)

    found = rehearse(
        Net(inside, experts, width), F.mse_loss, strategy, batches(width), optimizer=SGD
    )

    assert found.losses == pytest.approx(plain(model, width), rel=1e-12)
    for name, wanted in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], wanted.detach(), rtol=1e-10, atol=1e-12)


def planned(equation: str, *operands: Tensor, optimize: str) -> tuple[object, ...]:
    """As opt_einsum plans: by the sizes of all operands."""
    sizes = [operand.numel() for operand in operands]
    first = 0 if int(sizes[0]) > int(sizes[1]) else 1
    return [(first, 2), (0, 1)], None


@pytest.mark.soak
def test_an_einsum_is_traced_where_opt_einsum_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(contract_path=planned)
    monkeypatch.setattr(opt_einsum, "is_available", lambda: True)
    monkeypatch.setitem(vars(opt_einsum.m), "enabled", True)
    monkeypatch.setattr(opt_einsum, "get_opt_einsum", lambda: package)

    test_experts_that_count_themselves_train_as_on_one_device(one_hot, (4, 6))


def as_number(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grouped_mm(rows, weight, counts) * ids_of(counts).unsqueeze(1)


def in_all(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    share = torch.zeros(counts.shape[0], dtype=rows.dtype) + counts / counts.sum()
    return grouped_mm(rows, weight, counts) * share[ids_of(counts)].unsqueeze(1)


@one_of(2)
@pytest.mark.parametrize("inside", [as_number, in_all])
def test_experts_that_use_their_number_in_another_way_are_not_supported(inside: Inside) -> None:
    strategy = [Place(where(), [0, 1]), Replicate(where(), [0, 1]), Shard(where(EP=0), [0, 1])]

    with pytest.raises(CaptureError, match="test_expert_sizes.py.* depends on other rows"):
        rehearse(Net(inside, 4, 6), F.mse_loss, strategy, batches(6), optimizer=SGD)
