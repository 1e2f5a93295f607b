"""Jobs whose stages have different numbers of devices: examples, options, experts beside them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from draws import every
from job.test_numerics import Net, compared
from replicas import ADAMW, batches, build, captured, close_tensors, plain
from shared_capture import using
from torch import Tensor, nn

from piper import Place, Replicate, Shard, Split, Strategy, annotate, rehearse, where
from piper.cli.target import inspect
from piper.directives import Directive
from piper.errors import PassError
from piper.ir.by_device.schedule_rows import dag_rows
from piper.job.batch.batch import Batch
from piper.job.compile.pricing import predict, price
from piper.job.inspection import Inspected
from piper.job.job import Job
from piper.job.numerics import compare
from piper.view.schedule_grid import grid, summary
from piper.view.view_data import view_data

LITERATURE = Path(__file__).parents[2] / "examples" / "literature"
TWO_TO_ONE: list[Directive] = [
    Place(where(PP=0), [0, 2]),
    Place(where(PP=1), [1]),
    Replicate(where(PP=0), [0, 2], zero=2),
    Split("MB", 2),
]


@cache
def inspected(name: str) -> Inspected:
    return inspect(LITERATURE / f"{name}.py", [])


@pytest.mark.parametrize("name", every(2, ["encoder_beside_decoder", "asymmetric_stages"]))
def test_examples_train_as_plain_pytorch(name: str) -> None:
    found = inspected(name)

    result = compare(found.job, found.example, found.captured, found.compiled, steps=2)

    assert result.agrees
    assert found.compiled.dag.shares_devices


def weight(tokens: Tensor, labels: Tensor) -> float:
    """Another one for each microbatch."""
    return float((labels > 3).sum()) + 1


def test_microbatches_of_unequal_replicas_may_have_weights_and_gradients_be_clipped() -> None:
    assert compared(TWO_TO_ONE, max_norm=0.1, loss_weight=weight).agrees


def test_replicas_that_share_a_device_are_given_one_batch() -> None:
    jobs = {
        "two to one": [Place(where(PP=0), [0, 2]), Place(where(PP=1), [1])],
        "four to two": [Place(where(PP=0), [0, 2, 3, 5]), Place(where(PP=1), [1, 4])],
        "two thirds": [Place(where(), [0, 0, 1])],
        "two thirds twice": [Place(where(), [0, 0, 1, 2, 2, 3])],
    }

    found = {
        name: Job(Net(), nn.functional.mse_loss, Strategy(places)) for name, places in jobs.items()
    }

    assert {name: (job.replicas, job.microbatches) for name, job in found.items()} == {
        "two to one": (1, 2), "four to two": (2, 2), "two thirds": (1, 3),
        "two thirds twice": (2, 3),
    }  # fmt: skip
    assert [found["four to two"].feeds.feed(device) for device in range(6)] == [0, 0, 0, 1, 1, 1]


def test_dropout_of_every_replica_is_its_own() -> None:
    """As in one process that runs the same microbatches: the losses of microbatches are equal."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (8, 8))

    def parts(strategy: list[Directive]) -> dict[int, float]:
        def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())

        found = rehearse(Net(dropout=0.5), loss_fn, strategy, [(tokens, tokens)])
        return dict(found.parts[0])

    alone = parts([Place(where(), [0]), Split("MB", 4)])

    assert parts(TWO_TO_ONE) == alone
    assert len(set(alone.values())) == 4


def test_experts_may_be_divided_beside_a_stage_on_fewer_devices() -> None:
    """The first stage has all experts on one device; the second divides them over two."""
    strategy = [
        Place(where(PP=0), [0]),
        Place(where(PP=1), [1, 2]),
        Replicate(where(PP=1), [1, 2], zero=2),
        Shard(where(PP=1, EP="*"), [1, 2]),
        Split("MB", 2),
    ]
    name, rows, parts = "moe spread", 8, 4
    (model, loss_fn), wanted = build(name, 2), plain(name, 2, rows, parts)

    with using(captured(name, 2, rows // parts)[2]):
        found = rehearse(model, loss_fn, strategy, batches(name, rows), optimizer=ADAMW)

    for part in wanted.parameters:
        close_tensors(found.parameters[part.name].flatten(), part.values, part.name)
    assert found.losses == pytest.approx(wanted.loss, rel=1e-12)


class Counting(nn.Module):
    """The second stage keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.first(x)
        with annotate("PP"):
            return self.norm(x)


def test_several_replicas_of_running_statistics_are_not_supported() -> None:
    rows = torch.zeros(8, 4)
    job = Job(Counting(), nn.functional.mse_loss, Strategy(TWO_TO_ONE))

    with pytest.raises(PassError) as refused:
        job.compile(Batch.of((rows, rows)))

    assert str(refused.value) == (
        "strategy: PP1 updates buffers (running statistics) on devices [1, 1]: replicas on one "
        "device would update the same ones\n"
        "  fix: use a norm without running statistics, put the module in eval mode, or place every "
        "region on as many devices as PP1"
    )


def test_views_and_prices_know_every_replica() -> None:
    found = inspected("encoder_beside_decoder")
    dag, plans = found.compiled.dag, found.compiled.plans

    simulated = price(found.compiled)
    predicted = predict(found.compiled, simulated)
    data = view_data("two to one", dag, plans)

    assert summary(dag_rows(dag)).startswith("24 time steps, idle 50 %")
    drawn = grid(dag_rows(dag)).splitlines()[1].split()
    assert drawn[:9] == ["device", "2", "0F0", "0F0", "1F0", "1F0", "1B0", "---", "1B0"]
    assert predicted.peaks[2].total > predicted.peaks[2].held["parameters"]
    table = data.devices[2].instructions
    pairs = zip(table["kind"], table["node"], strict=True)
    runs = [node for kind, node in pairs if kind in "FB"]
    assert len(runs) == 16
    assert sorted(set(runs)) == sorted({n for n in runs if runs.count(n) == 2})
    assert all(span.end > span.start for span in data.traces[0].spans[2][:3])
