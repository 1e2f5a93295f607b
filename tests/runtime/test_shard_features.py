"""What else experts must do: streams, tuning, shares of state, orders by hand, refusals."""

from __future__ import annotations

import pytest
import torch
from pool import run_on
from replicas import assert_same, batches, build, captured, plain, train_all
from runtime.test_shard_rehearsed import rehearsed
from shared_capture import using
from torch import Tensor, nn
from torch.nn import functional
from tuned import shares, tune

from piper.capture import annotate
from piper.directives import Order, Place, Replicate, Shard, Split, Strategy
from piper.errors import CaptureError, DirectiveError
from piper.ir.filters import where
from piper.job.inspection import Inspected, inspecting
from piper.job.programs.rehearsal import rehearse
from piper.models.grouped import grouped_mm
from piper.strategies import one_f_one_b
from piper.trainer import Trainer


def pair(**options: object) -> Strategy:
    """Two devices, half of the experts on each."""
    return one_f_one_b(pp=1, microbatches=2, dp=2, ep=2, **options)


def test_reductions_and_tokens_on_one_stream_or_in_small_messages() -> None:
    """The three choices of the published work."""
    choices = [{"reduce_stream": "ep"}, {"reduce_stream": "dp"}, {"bucket_mb": 1e-5}]
    more = [{"reduce_stream": "ep", "gather_stream": "ep", "zero": 3}]
    texts = [pair(**choice).to_json() for choice in (*choices, *more)]

    runs = run_on(2, train_all, "moe skewed", 1, 4, texts)

    for of_choice in zip(*runs, strict=True):
        assert_same(of_choice, plain("moe skewed", 1, 4, 4))


def test_every_device_has_its_share_of_parameters_and_optimizer_state() -> None:
    held = run_on(2, shares, pair().to_json())

    whole = sum(p.numel() for n, p in build("moe spread", 1)[0].named_parameters() if is_expert(n))
    for mine in held:
        assert mine["parameters"] == whole // 2
        assert mine["gradients"] == mine["exp_avg"] == mine["exp_avg_sq"] == trained() // 2


def is_expert(name: str) -> bool:
    return name.endswith(("into", "back", "gain"))


def trained() -> int:
    named = build("moe spread", 1)[0].named_parameters()
    return sum(p.numel() for n, p in named if is_expert(n) and p.requires_grad)


def test_tuning_changes_nothing_but_the_costs() -> None:
    found = run_on(2, tune, pair().to_json())

    assert found[0].costs == found[1].costs, "plans must be the same everywhere"
    assert found[0].costs.figures and found[0].costs.streams.keys() == {"ep"}
    assert all(one.seconds > 0 and one.work for one in found[0].costs.figures.values())
    assert found[0].before == found[0].after, "parameters and optimizer state"
    assert found[0].losses == found[0].untuned


def test_an_order_by_hand_names_every_region() -> None:
    """Forward of one microbatch and backward of another, interleaved as one likes."""

    def passes(name: str, part: int, *runs: dict[str, object]) -> list[object]:
        return [where(PP=0, MB=part, PASS=name, **run) for run in runs]

    dense, tail, away = {"EP": None, "RUN": 0}, {"EP": None, "RUN": 1}, {"EP": 0}
    order = Order([
        passes("F", 0, dense, away, tail),
        [where(PP=0, MB=1, PASS="F", **dense), where(PP=0, MB=0, PASS="B", **tail),
         where(PP=0, MB=1, PASS="F", **away), where(PP=0, MB=0, PASS="BI", **away),
         where(PP=0, MB=0, PASS="BW", **away), where(PP=0, MB=1, PASS="F", **tail),
         where(PP=0, MB=0, PASS="B", **dense)],
        [*passes("B", 1, tail), *passes("BI", 1, away), *passes("BW", 1, away),
         *passes("B", 1, dense)],
    ], overlap=False)  # fmt: skip
    both = [0, 1]
    strategy = Strategy([
        Place(where(PP=0), both), Replicate(where(PP=0), both), Shard(where(EP="*"), both),
        Split("MB", 2), order,
    ])  # fmt: skip

    rehearsed(strategy, 2, "skewed")

    assert Strategy.from_json(strategy.to_json()) == strategy
    assert "overlap=False" in str(strategy)


class Region(nn.Module):
    """A dense layer, then experts that do what the test says."""

    def __init__(self, inside: object, experts: int = 4, extra: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = inside
        self.dense = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(experts, 6, 6))
        self.extra = nn.Parameter(torch.randn(extra)) if extra else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x))
        expert = x.sum(-1).detach().mul(10).long() % self.weight.shape[0]
        order = expert.argsort(stable=True)
        counts = expert.new_zeros(self.weight.shape[0]).scatter_add(
            0, expert, torch.ones_like(expert)
        )
        rows = x[order]
        with annotate("EP"):
            rows = self.inside(self, rows, counts)
        return rows * 1.0


def grouped(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    return grouped_mm(rows, self.weight, counts)


def over_rows(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    return grouped(self, rows, counts).softmax(0)


def fixed(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    return grouped(self, rows.view(2, 4, 6).flatten(0, 1), counts)


def loop(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    return sum(grouped(self, rows, counts) * self.weight[e].mean() for e in range(4))


def shared(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    return grouped(self, rows, counts) * self.extra


def dropped(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    return functional.dropout(grouped(self, rows, counts))


def compile_region(model: Region) -> None:
    both = [0, 1]
    strategy = [Place(where(), both), Replicate(where(), both), Shard(where(EP=0), both)]
    example = (torch.randn(8, 6), torch.randn(8, 6))
    with inspecting():
        Trainer(model, functional.mse_loss, strategy, example=example)


def place_of(counts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The expert of each row, and its place among the rows of that expert."""
    expert = torch.repeat_interleave(counts)
    place = torch.ones_like(rows[:, 0]).cumsum(0) - 1
    return expert, place - (counts.cumsum(0) - counts)[expert]


def own_mean(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    """As a batch norm over the rows of each expert."""
    y = grouped(self, rows, counts)
    expert, _ = place_of(counts, rows)
    sums = torch.zeros_like(self.weight[:, 0]).index_add(0, expert, y)
    return y - (sums / counts.clamp(min=1).unsqueeze(1))[expert]


def capacity(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    """What comes too late is dropped."""
    _, place = place_of(counts, rows)
    return grouped(self, rows, counts) * (place < 3).unsqueeze(1)


def counted(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    expert, _ = place_of(counts, rows)
    return grouped(self, rows, counts) / counts.to(rows.dtype)[expert].unsqueeze(1)


def side_loss(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    """In the backward only: a side loss that rides on the result."""
    y = grouped(self, rows, counts)
    side = y.pow(2).mean()
    return y + (side - side.detach())


def resorted(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    return grouped(self, rows, counts)[rows[:, 0].argsort()]


def centred(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    other = (self.weight - self.weight.mean((1, 2), keepdim=True)).mean(0, keepdim=True)
    return grouped_mm(rows, self.weight + other, counts)


def little(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    return 1e-5 * grouped(self, rows, counts).softmax(0)


MIXING = (own_mean, capacity, counted, side_loss, resorted, centred, little)


@pytest.mark.parametrize("inside", MIXING, ids=lambda inside: inside.__name__)
def test_rows_that_know_of_each_other_in_hidden_ways_are_refused(inside: object) -> None:
    """Each of these would train wrongly, without a word."""
    with pytest.raises(CaptureError, match="depends on other rows"):
        compile_region(Region(inside))


def rooted(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    return grouped(self, rows, counts) * rows[:, :1].abs().sqrt().log()


def biased(self: Region, rows: Tensor, counts: Tensor) -> Tensor:
    bias = torch.repeat_interleave(self.weight.mean((1, 2)), counts, dim=0)
    return (grouped(self, rows, counts) + bias.unsqueeze(1)).softmax(-1).topk(6).values


@pytest.mark.parametrize("inside", [grouped, rooted, biased], ids=lambda inside: inside.__name__)
def test_experts_that_mind_their_own_rows_are_accepted(inside: object) -> None:
    with pytest.raises(Inspected):
        compile_region(Region(inside))


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (over_rows, "depends on other rows"),
        (fixed, "works only for one number of rows or experts"),
        (loop, "works only for one number of rows or experts"),
    ],
)
def test_experts_that_know_of_each_other_are_refused(inside: object, said: str) -> None:
    with pytest.raises(CaptureError, match=said) as refused:
        compile_region(Region(inside))

    assert "test_shard_features.py" in str(refused.value), "it says where"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Region(shared, extra=6), r"parameter extra is float32\[6\] \(expected a first dimension"),
        (Region(dropped), "uses random numbers"),
        (Region(grouped, experts=3), "cannot be divided evenly over 2 devices"),
    ],
)
def test_regions_that_are_none_of_experts_are_refused(model: Region, said: str) -> None:
    with pytest.raises(DirectiveError, match=said):
        compile_region(model)


def test_optimizers_that_need_whole_parameters_are_refused() -> None:
    model, loss, known = captured("moe spread", 1, 1)
    data = batches("moe spread", 4)
    with pytest.raises(Exception, match="Adafactor"), using(known):
        rehearse(model, loss, pair(), data, optimizer=torch.optim.Adafactor)
