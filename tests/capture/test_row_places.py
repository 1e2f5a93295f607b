"""Where the place of a row in its batch matters, by what a model calls for two numbers of rows."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.capture.trace.arguments.inputs import inputs_of
from piper.capture.trace.row_calls.recorded_calls import RowCounts
from piper.capture.trace.row_calls.row_places import RowPlaces
from piper.capture.trace.row_calls.unvalued_run import calls_of
from piper.job.loss import trial_size

WIDTH = 8
Form = Callable[[Tensor, Tensor], Tensor]
Mix = Callable[[Tensor], Tensor]


def zeroed(h: Tensor) -> Tensor:
    h = h.clone()
    h[4:] *= 0.5
    return h


def experts(h: Tensor, y: Tensor) -> Tensor:
    """The two best of each row, sorted by expert, and put back."""
    score, chosen = h.softmax(-1).topk(2)
    order = chosen.flatten().argsort(stable=True)
    rows = (h[order // 2] @ torch.ones(WIDTH, WIDTH)).relu()
    rows = torch.zeros_like(rows).index_copy(0, order, rows)
    return h + (rows.view(*score.shape, WIDTH) * score.unsqueeze(-1)).sum(1)


def put(h: Tensor) -> Tensor:
    h = h.clone()
    h[5] = 0
    return h


def multiplied(h: Tensor) -> Tensor:
    h = h.clone()
    h[2:5].mul_(2)
    return h


def in_part(h: Tensor) -> Tensor:
    h = h.clone()
    h[2:5][:, 1] = 3
    return h


def listed(h: Tensor) -> Tensor:
    h = h.clone()
    h[torch.tensor([3, 5])] = 0
    return h


def weighed(h: Tensor) -> Tensor:
    w = torch.ones(len(h))
    w[3] = 0.5
    return h * w[:, None]


def of_each(h: Tensor, y: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = 0
    h[:, 1:3] *= 2
    h[y > 3] = 1
    h[torch.arange(len(h)), y] = 2
    h[torch.arange(len(h)), 1] = 3
    h[:] += 1
    h[..., -1].mul_(2)
    h[y.argsort()] = h[y.argsort()] * 2
    ends = torch.zeros(len(h) + 1)
    ends[0] = 1
    ends[1:] = torch.ones(len(h))
    return h * ends[1:, None]


FIVE = torch.tensor([5])
WRITES: dict[str, Form] = {
    "put": lambda h, y: put(h),
    "multiplied": lambda h, y: multiplied(h),
    "in a part": lambda h, y: in_part(h),
    "listed": lambda h, y: listed(h),
    "weighed": lambda h, y: weighed(h),
    "filled": lambda h, y: h.index_fill(0, FIVE, 0.0),
    "by index": lambda h, y: h.index_put((FIVE,), torch.tensor(0.0)),
    "added": lambda h, y: h.index_add(0, FIVE, torch.ones(1, WIDTH)),
    "scattered": lambda h, y: h.scatter(0, torch.full((1, WIDTH), 5), 0.0),
    "added up": lambda h, y: h.scatter_add(
        0, torch.full((1, WIDTH), 5), torch.ones(1, WIDTH)
    ),
    "selected": lambda h, y: h.select_scatter(torch.zeros(WIDTH), 0, 5),
    "sliced": lambda h, y: h.slice_scatter(torch.zeros(3, WIDTH), 0, 2, 5),
    "one of them": lambda h, y: h * (1 + F.one_hot(torch.tensor(5), len(h))[:, None]),
}  # fmt: skip
PLACES: dict[str, Form] = {
    **{f"writes, {name}": form for name, form in WRITES.items()},
    "first rows": lambda h, y: torch.where((torch.arange(len(h)) < 8)[:, None], h, h * 0.5),
    "parts": lambda h, y: torch.cat([h[:8], h[8:] * 0.5]),
    "one row": lambda h, y: h + h[5:6].sum(0),
    "the last row": lambda h, y: h + h[-1],
    "shifted": lambda h, y: h + F.pad(h, (0, 0, 5, 0))[: len(h)],
    "a table of places": lambda h, y: h + torch.eye(WIDTH)[(torch.arange(len(h)) > 4).long()],
    "written": lambda h, y: zeroed(h),
    "growing weights": lambda h, y: h * (1 + torch.arange(len(h)) // 6)[:, None],
    "distant rows": lambda h, y: torch.einsum("ij,jd->id", torch.ones(len(h), len(h)).tril(-5), h),
    "halves": lambda h, y: torch.cat([one * (k + 1) for k, one in enumerate(h.chunk(2))]),
    "ramp": lambda h, y: h * torch.linspace(0, 1, len(h))[:, None],
    "every second": lambda h, y: h + h[::2].mean(0),
    "counted": lambda h, y: h * torch.ones(len(h)).cumsum(0)[:, None],
    "pairs": lambda h, y: h - torch.eye(len(h)) @ h,
    "narrowed": lambda h, y: h.narrow(0, 0, 8).mean() + h,
    "listed": lambda h, y: h + h[[0, 1]].sum(0),
    "behind another": lambda h, y: h + torch.cat([torch.zeros(1, WIDTH), h])[:-1],
    "moved": lambda h, y: h + torch.cat([torch.zeros(5, WIDTH), h])[: len(h)],
    "window": lambda h, y: h * torch.hann_window(len(h))[:, None],
    "all but one": lambda h, y: h * F.pad(torch.ones(len(h) - 1), (1, 0))[:, None],
    "joined": lambda h, y: h * torch.cat([torch.zeros(1), torch.ones(len(h) - 1)])[:, None],
    "mixed up": lambda h, y: 0.7 * h + 0.3 * h[torch.randperm(len(h))],
    "mixed up by draws": lambda h, y: 0.7 * h + 0.3 * h[torch.rand(len(h)).argsort()],
    "groups of four": lambda h, y: torch.zeros_like(h).index_add(0, torch.arange(len(h)) // 4, h),
    "compared": lambda h, y: torch.where((y > torch.arange(len(y)))[:, None], h, h * 2),
}
OWN: dict[str, Form] = {
    "written to each": of_each,
    "slices of all": lambda h, y: h.slice_scatter(h[:, :2] * 2, 1, 0, 2),
    "features filled": lambda h, y: h.index_fill(1, FIVE, 0.0).scatter(1, y[:, None], 1.0),
    "looked up": lambda h, y: h * (1 + h[torch.arange(len(h)), y])[:, None],
    "behind an index": lambda h, y: h * (1 + h.mT[y, torch.arange(len(h))])[:, None],
    "flat": lambda h, y: h * (1 + h.flatten()[torch.arange(len(h)) * WIDTH + y])[:, None],
    "features": lambda h, y: torch.where(torch.arange(WIDTH) < 3, h, h * 0.5),
    "parts of features": lambda h, y: torch.cat([h[:, :3], h[:, 3:] * 2], 1),
    "ones": lambda h, y: h * torch.ones(len(h))[:, None] + torch.zeros_like(h),
    "filled": lambda h, y: h * torch.zeros(len(h), WIDTH).scatter(1, y[:, None], 1.0),
    "one hot": lambda h, y: h * F.one_hot(y, WIDTH),
    "put": lambda h, y: (
        h * torch.zeros(len(h), WIDTH).index_put((torch.arange(len(h)), y), torch.tensor(1.0))
    ),
    "expanded places": lambda h, y: h * torch.arange(WIDTH).expand(len(h), -1).cumsum(1),
    "sorted and back": lambda h, y: h[y.argsort()][y.argsort().argsort()],
    "inverse": lambda h, y: h[y.argsort()][
        torch.empty_like(y).scatter(0, y.argsort(), torch.arange(len(y)))
    ],
    "of a type": lambda h, y: h + torch.linspace(0, 1, WIDTH).to(h) + torch.ones(WIDTH).type_as(h),
    "sizes of one": lambda h, y: h + torch.zeros_like(h[:1]) + h.new_ones(h[0].shape),
    "two views": lambda h, y: torch.cat([h, h.flip(1)])[: len(h)] * torch.cat([h, h])[len(h) :],
    "chunks of two": lambda h, y: sum(torch.cat([h, h * 2]).chunk(2)),
    "more rows": lambda h, y: F.pad(h, (0, 0, 0, 3))[: len(h)],
    "experts": lambda h, y: h.new_zeros(h.shape).index_add(
        0, torch.where(y == 1)[0], h[torch.where(y == 1)[0]]
    )
    * 2,
    "copied back": lambda h, y: torch.empty_like(h).index_copy(0, y.argsort(), h[y.argsort()]),
    "sorted, and labels": lambda h, y: (
        (h[y.argsort()] * F.one_hot(y, WIDTH)[y.argsort()]).tanh()[y.argsort().argsort()] + h
    ),
    "a bias, sorted": lambda h, y: (
        h[y.argsort()] + torch.ones_like(h) @ torch.ones(WIDTH, WIDTH)
    )[y.argsort().argsort()],
    "two experts": experts,
    "sorted lengths": lambda h, y: (
        h[y.sort().indices] * (torch.arange(WIDTH) < y.sort().values[:, None])
    )[y.sort().indices.argsort()],
    "experts, sorted": lambda h, y: h + torch.zeros_like(h).index_add(
        0, y.argsort(), (h[y.argsort()] @ torch.ones(WIDTH, WIDTH)).relu()
    ),
    "last of each": lambda h, y: (
        h + h.view(-1, 2)[torch.arange(len(h)) * 4 + 3].repeat(1, WIDTH // 2)
    ),
    "groups of rows": lambda h, y: h.view(-1, 4, WIDTH).softmax(1).view_as(h),
    "time first": lambda h, y: (
        h.view(-1, 4, 2).transpose(0, 1).reshape(-1, 2).view(4, -1, 2).mean(0).repeat(1, 4)
    ),
    "heads": lambda h, y: (
        h.view(-1, 4, 2).transpose(0, 1).reshape(4 * len(h), 2).view(4, len(h), 2)
        .transpose(0, 1).reshape(len(h), WIDTH)
    ),
    "flat and back": lambda h, y: h.T.reshape(-1).view(WIDTH, -1).T.flatten().view(-1, WIDTH),
    "repeated": lambda h, y: h.repeat_interleave(3, 0).view(-1, 3, WIDTH).mean(1)
    + h.repeat(3, 1).view(3, -1, WIDTH).mean(0),
    "by hand": lambda h, y: torch.empty_like(h).scatter(
        0, y.argsort()[:, None].expand_as(h), h[y.argsort()]
    ),
    "places in rows": lambda h, y: (h.flatten() * (torch.arange(h.numel()) % WIDTH)).view_as(h),
    "triangles of features": lambda h, y: h @ torch.ones(WIDTH, WIDTH).tril(),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.form = nn.Linear(WIDTH, WIDTH), form

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.form(self.layer(x), y)


def line_of(form: Form) -> str | None:
    given = torch.randn(8, WIDTH), torch.randint(WIDTH, (8,)), torch.randn(8, WIDTH)
    inputs = inputs_of(given, frozenset())
    own, every = (
        calls_of(Net(form), F.mse_loss, inputs.with_rows(rows), "cpu", None) for rows in (8, 16)
    )
    found = RowPlaces().first(own, every, RowCounts(8, 16))
    return found and found.line


@one_of(4)
@pytest.mark.parametrize("name", PLACES)
def test_the_line_is_found(name: str) -> None:
    found = line_of(PLACES[name])

    assert found is not None and "test_row_places.py" in found


@one_of(4)
@pytest.mark.parametrize("name", OWN)
def test_what_each_row_finds_for_itself_is_none(name: str) -> None:
    assert line_of(OWN[name]) is None


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first rows": lambda o, y: ((o - y).square().mean(1) * (torch.arange(len(o)) < 8)).mean(),
    "late rows": lambda o, y: ((o - y).square().mean(1) * (1 + torch.arange(len(o)) // 8)).mean(),
    "tokens": lambda o, y: ((o - y).square().flatten() * (torch.arange(o.numel()) < 64)).mean(),
}


@one_of(2)
@pytest.mark.parametrize("name", [*LOSSES, "model"])
def test_large_models_are_warned_of_though_trials_run_two_rows(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial_size, "WHOLE", 0.0)  # as if this model was large
    x, y = torch.randn(2, 16, WIDTH).unbind()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    if name == "model":
        model.append(Places())
    strategy = [Place(where(), [0]), Split("MB", 2 if name == "model" else 4)]
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(model, LOSSES.get(name, F.mse_loss), strategy, [(x, y)])

    assert "the place of a row in its batch matters at test_row_places.py" in caplog.text


def added_by_class(h: Tensor) -> Tensor:
    kinds = h.detach().argmax(1) % 3
    return h + torch.zeros_like(h).index_add_(0, kinds, h)[kinds]


def scattered_by_class(h: Tensor) -> Tensor:
    kinds = h.detach().argmax(1) % 3
    sums = torch.zeros_like(h)
    sums.scatter_add_(0, kinds[:, None].expand_as(h), h)
    return h + sums[kinds]


MEETING: dict[str, Mix] = {
    "the largest": lambda h: h / h.abs().max(),
    "attention": lambda h: (h @ h.T).softmax(-1) @ h,
    "order": lambda h: h * h[:, 0].argsort()[:, None],
    "median": lambda h: h - h.median(),
    "distances": lambda h: h + torch.cdist(h, h).mean(1, keepdim=True),
    "spectrum": lambda h: torch.fft.fft(h, dim=0).real,
    "in order beside rows": lambda h: h + h[h[:, 0].argsort()],
    "rotated": lambda h: torch.rot90(h, 2, (0, 1)),
    "another layout": lambda h: h.T.reshape(h.shape),
    "time of other rows": lambda h: h.view(-1, 2).view(4, -1, 2).mean(0).repeat(1, 4),
    "rows of others": lambda h: h.repeat_interleave(2, 0)[: len(h)],
    "groups by place": lambda h: h.view(3, -1, WIDTH).softmax(0).view_as(h),
    "turns counted as rows": lambda h: h.repeat(2, 1).view(-1, 2, WIDTH).mean(1),
    "tokens of some rows": lambda h: h + h.view(-1, 2)[: len(h)].repeat(1, 4),
    "flat": lambda h: h + h.flatten().roll(8).view_as(h),
    "quantised": lambda h: (h * 7 / h.abs().max()).round(),
    "counted": lambda h: h / torch.bincount(h.argmax(1), minlength=WIDTH)[h.argmax(1)][:, None],
    "softmax": lambda h: h.softmax(0),
    "sorted": lambda h: h.sort(0).values,
    "running": lambda h: h.cumsum(0),
    "turned": lambda h: h + h.flip(0),
    "normalised": lambda h: (h - h.mean(0)) / h.std(0),
    "Gram": lambda h: h @ (h.T @ h),
    "attention over rows": lambda h: F.scaled_dot_product_attention(h, h, h),
    "recurrent": lambda h: nn.GRU(WIDTH, WIDTH)(h)[0],
    "time that is rows": lambda h: nn.GRU(WIDTH, WIDTH)(h[:, None])[0][:, 0],
    "convolved": lambda h: F.conv1d(h.T[None], torch.ones(WIDTH, WIDTH, 3), padding=1)[0].T,
    "pooled": lambda h: F.avg_pool1d(h.T[None], 3, 1, 1)[0].T,
    "normalised by all": lambda h: F.layer_norm(h, h.shape),
    "normalised along rows": lambda h: F.instance_norm(h.T[None])[0].T,
    "groups": lambda h: h + h.view(3, -1, WIDTH).var(0).mean(-1, keepdim=True).repeat(3, 1),
    "solved": lambda h: torch.linalg.solve(h.T @ h + torch.eye(WIDTH), h.T).T,
    "three": lambda h: torch.einsum("bd,cd,ce->be", h, h, h),
    "both spectra": lambda h: torch.fft.fft2(h).real,
    "pseudo-inverse": lambda h: torch.linalg.pinv(h).T,
    "a slope": lambda h: F.prelu(h, h.mean().abs().view(1)),
    "a rest": lambda h: torch.remainder(h, h.max()),
    "turned by numbers": lambda h: 0.7 * h + 0.3 * h[torch.arange(len(h) - 1, -1, -1)],
    "neighbours": lambda h: h + h[(torch.arange(len(h)) + 1) % len(h)],
    "the same for all": lambda h: h.mean(0).expand(len(h), -1),
    "prototypes": lambda h: torch.zeros(3, WIDTH).index_add(0, h.detach().argmax(1) % 3, h)[
        h.detach().argmax(1) % 3
    ],
    "product of three": lambda h: torch.linalg.multi_dot([h, h.T, h]),
    "covered": lambda h: h.masked_fill(h > h.mean(), 0.0),
    "attention that has time first": lambda h: nn.MultiheadAttention(2, 1)(
        *3 * [h.view(-1, 4, 2)], need_weights=False
    )[0].flatten(1),
    "attention with heads": lambda h: nn.MultiheadAttention(2, 2)(
        *3 * [h.view(-1, 4, 2)], need_weights=False
    )[0].flatten(1),
    "added by class": added_by_class,
    "scattered by class": scattered_by_class,
    "the one before": lambda h: h + F.pad(h, (0, 0, 1, -1)),
    "the one after": lambda h: h + F.pad(h, (0, 0, -1, 1)),
}
ALONE: dict[str, Mix] = {
    "features": lambda h: h.softmax(1) + h.cumsum(1) + h.sort(1).values + h.flip(1),
    "norms": lambda h: F.layer_norm(h, (WIDTH,)) / h.norm(dim=1, keepdim=True),
    "batch norm": lambda h: F.batch_norm(h, torch.zeros(WIDTH), torch.ones(WIDTH), training=True),
    "recurrent": lambda h: nn.GRU(WIDTH, WIDTH, batch_first=True)(h[:, None])[0][:, 0],
    "time first": lambda h: nn.GRU(WIDTH, WIDTH)(h[None])[0][0],
    "convolved": lambda h: F.conv1d(h[:, None], torch.ones(1, 1, 3), padding=1)[:, 0],
    "tokens in two": lambda h: h.view(-1, 2, WIDTH // 2).softmax(-1).view_as(h),
    "contracted features": lambda h: torch.einsum("bd,ed->be", h, torch.ones(WIDTH, WIDTH)),
    "side loss": lambda h: h * h.detach(),
    "gram of features": lambda h: (h[:, :, None] @ h[:, None]).flatten(1)[:, :WIDTH],
    "spectrum": lambda h: torch.fft.fft(h).real,
    "largest of each": lambda h: h / h.amax(1, keepdim=True),
}


@one_of(30)
@pytest.mark.parametrize("rows", [6, 12])
@pytest.mark.parametrize("name", MEETING)
def test_rows_that_meet_are_seen_in_models_that_cannot_be_tried(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial_size, "WHOLE", 0.0)
    monkeypatch.setattr(trial_size, "MOST", 0.0)
    x, y = torch.randn(2, rows, WIDTH).unbind()
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Mixing(MEETING[name]), F.mse_loss, HALVES, [(x, y)])

    assert "test_row_places.py" in caplog.text


@one_of(6)
@pytest.mark.parametrize("name", ALONE)
def test_rows_that_do_not_meet_need_no_warning(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial_size, "WHOLE", 0.0)
    monkeypatch.setattr(trial_size, "MOST", 0.0)
    x, y = torch.randn(2, 12, WIDTH).unbind()
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Mixing(ALONE[name]), F.mse_loss, HALVES, [(x, y)])

    assert not caplog.messages


HALVES = [Place(where(), [0]), Split("MB", 2)]


class Mixing(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mix(self.layer(x)))


class Places(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([h[:8], h[8:] * 0.5])


class Expanding(nn.Module):
    """Its scale gets a dimension more if there are several rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if len(x) == 1 else self.scale.expand(len(x), -1)
        empty = torch.zeros(0, WIDTH).unbind()
        return self.layer(x) * scale + len(empty)


def test_what_is_expanded_for_several_rows_only_needs_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, (x, y) = Expanding(), torch.randn(2, 4, WIDTH).unbind()
    wanted = F.mse_loss(model(x), y).item()
    with caplog.at_level(logging.WARNING, "piper"):
        found = rehearse(model, F.mse_loss, [Place(where(), [0]), Split("MB", 4)], [(x, y)])

    assert found.losses == pytest.approx([wanted], rel=1e-6)
    assert not caplog.messages
