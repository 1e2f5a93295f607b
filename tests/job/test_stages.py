"""One model, annotated by layers, under every builder: as plain PyTorch trains it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from draws import every, one_of
from shared_capture import one_model
from torch import Tensor, nn

import piper
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.numerics import compare
from piper.job.options import Options
from piper.strategies import BUILDERS, from_csv

VOCAB, DIM, LAYERS = 11, 6, 9


class Layered(nn.Module):
    """An embedding, layers, a norm and a tied head; nothing but the layers has a tag."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            with piper.annotate("L"):
                x = x + torch.tanh(layer(x))
        return self.norm(x) @ self.embedding.weight.t()


def loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def options(name: str) -> list[dict[str, int]]:
    sizes = [2] if name == "dualpipe" else [1, 2]
    levels = [{"dp": 1}, {"dp": 2, "zero": 3}]
    return [{"pp": pp, "microbatches": 4, **level} for pp in sizes for level in levels]


@pytest.fixture(scope="module")
def layered() -> Iterator[tuple[nn.Module, Batch]]:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (8, 3), generator=draw)
    with one_model()():
        yield Layered().double(), Batch.of((tokens, tokens.roll(1, 1)))


CASES = [
    pytest.param(name, given, marks=() if place * 2 == k % 8 else pytest.mark.soak)
    for k, name in enumerate(BUILDERS)
    for place, given in enumerate(options(name))
]


@one_of(2)
@pytest.mark.parametrize(("name", "given"), CASES)
def test_a_layered_model_trains_as_plain_pytorch(layered, name: str, given: dict) -> None:
    agrees(layered, BUILDERS[name](**given))


@pytest.mark.parametrize("name", every(3, ["dualpipev", "1f1b", "zb-h1"]))
def test_stages_that_recompute_train_as_plain_pytorch(layered, name: str) -> None:
    some, given = piper.Remat(piper.where(PP=1)), {"pp": 2, "dp": 2, "zero": 2, "microbatches": 4}
    strategy = BUILDERS[name](**given)

    agrees(layered, strategy + some)
    agrees(layered, piper.Strategy([piper.Remat(piper.where(L="*")), *strategy]))


def test_other_sizes_and_unequal_stages_train_as_plain_pytorch(layered) -> None:
    agrees(layered, BUILDERS["1f1b"](pp=3, microbatches=4, stages=[1, 6, 2]))


def agrees(layered: tuple[nn.Module, Batch], strategy: piper.Strategy) -> None:
    model, example = layered
    optimizer = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
    job = Job(model, loss, strategy, Options(optimizer=optimizer, device="cpu"))

    found = compare(job, example, *job.compile(example))

    assert found.agrees, (found.steps, found.wrong)
    assert found.dtype == "float64"


CSV = "0F0,0F1,1F0,1F1,1B1,1B0,0B1,0B0\n"


@one_of(2)
@pytest.mark.parametrize(
    "strategy",
    [
        BUILDERS["1f1b"](pp=4, microbatches=2),
        pytest.param(BUILDERS["zb-h1"](pp=3, microbatches=1, dp=2, zero=2), marks=pytest.mark.soak),
        pytest.param(BUILDERS["dualpipev"](pp=2, microbatches=2), marks=pytest.mark.soak),
        from_csv(CSV, dp=2, zero=3),
    ],
    ids=["1f1b", "zb-h1", "dualpipev", "csv"],
)
def test_too_few_microbatches_and_tables_train_as_plain_pytorch(layered, strategy) -> None:
    agrees(layered, strategy)


class Quadratic(nn.Module):
    """Its first layer grows with the square of the length, the others with the length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            with piper.annotate("L"):
                y = layer(x)
                x = torch.tanh(y if k else (y @ y.transpose(1, 2)) @ y)
        return x


def test_parameters_stay_where_they_are_for_batches_of_other_shapes() -> None:
    short, long = (Batch.of((torch.ones(2, n, DIM), torch.ones(2, n, DIM))) for n in (2, 1000))
    strategy = BUILDERS["1f1b"](pp=2, microbatches=2)

    def cut(job: Job, batch: Batch) -> object:
        return job.compile(batch)[1].program[0].stages

    job = Job(Quadratic(), nn.MSELoss(), strategy, Options(device="cpu"))

    assert cut(job, short) == (2, 2)
    assert cut(job, long) == (2, 2), "a stage that moved would start from other parameters"
    assert cut(job.under(strategy), long) == (1, 3)
