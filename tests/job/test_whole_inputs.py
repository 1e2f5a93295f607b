"""Inputs without a batch dimension, whose first size happens to be that of the batch."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from draws import drawn, draws
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper import Place, Replicate, Split, where
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.batch.input_names import input_names

SIZE = 4  # of everything: batch, tokens, features, heads
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def drawn_tensor(shape: tuple[int, ...], seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


# The shape of each side input, and what a model does with it. x is [batch, tokens, features].
SIDES: dict[str, tuple[tuple[int, ...], Any]] = {
    "mask": ((SIZE, SIZE), lambda net, x, s: (x @ x.mT + s).softmax(-1) @ x),
    "causal": ((SIZE, SIZE), lambda net, x, s: (x @ x.mT).masked_fill(s > 0, -9.0).softmax(-1) @ x),
    "positions": ((SIZE,), lambda net, x, s: x + net.embed(s.abs().long().clamp(max=7))),
    "features": ((SIZE,), lambda net, x, s: x * s),
    "table": ((SIZE, SIZE), lambda net, x, s: x + s),
    "column": ((SIZE, 1), lambda net, x, s: x * s),
    "heads": ((SIZE, SIZE, SIZE), lambda net, x, s: net.heads(x, s)),
    "matrix": ((SIZE, SIZE), lambda net, x, s: x @ s),
    "leading": ((1, SIZE, SIZE), lambda net, x, s: x + s),
    "number": ((), lambda net, x, s: x * s),
    "padding": ((SIZE, SIZE), lambda net, x, s: x * s[:, :, None]),  # these are of the batch
    "scale": ((SIZE, 1, 1), lambda net, x, s: x * s),
    "other": ((SIZE, SIZE, SIZE), lambda net, x, s: x + s),
}
BATCH = ("padding", "scale", "other")


class Net(nn.Module):
    """Uses its side inputs one after the other."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds = kinds
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 1)
        self.embed = nn.Embedding(8, SIZE)
        self.double()

    def heads(self, x: Tensor, bias: Tensor) -> Tensor:
        queries = x[:, None].expand(-1, SIZE, -1, -1)
        return ((queries @ queries.mT + bias).softmax(-1) @ queries).mean(1)

    def forward(self, *given: Tensor) -> Tensor:
        sides = list(given)
        x = sides.pop(self.kinds.index("x"))
        with piper.annotate("PP"):
            x = torch.tanh(self.first(x))
        with piper.annotate("PP"):
            names = [kind for kind in self.kinds if kind != "x"]
            for kind, side in zip(names, sides, strict=True):
                x = SIDES[kind][1](self, x, side)
            return self.last(torch.tanh(x)).squeeze(-1)


def drawn_case(seed: int) -> tuple[list[str], int, int]:
    """Kinds of inputs in order, microbatches, replicas."""
    draw = random.Random(seed)
    kinds = draw.sample(sorted(SIDES), draw.choice([1, 1, 2, 3]))
    kinds.insert(draw.randrange(len(kinds) + 1), "x")
    return kinds, draw.choice([2, 4]), draw.choice([1, 2])


def batches_of(kinds: list[str], rows: int) -> list[tuple[Tensor, ...]]:
    """Two steps. What has no batch dimension differs between them, but not between rows."""
    shapes = {"x": (rows, SIZE, SIZE)}
    shapes |= {name: (rows, *shape[1:]) for name, (shape, _) in SIDES.items() if name in BATCH}
    found = []
    for step in range(2):
        given = [shapes.get(kind, SIDES.get(kind, ((), 0))[0]) for kind in kinds]
        tensors = [drawn_tensor(shape, 100 * step + k) for k, shape in enumerate(given)]
        found.append((*tensors, drawn_tensor((rows, SIZE), 100 * step + 99)))
    return found


def plain(model: nn.Module, batches: list[tuple[Tensor, ...]]) -> list[float]:
    """The whole batch at once, in one process."""
    optimizer, losses = SGD(model.parameters()), []
    for *inputs, labels in batches:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(*inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def strategy(microbatches: int, replicas: int) -> list[Any]:
    if replicas == 1:
        return [Place(where(PP=0), [0]), Place(where(PP=1), [1]), Split("MB", microbatches)]
    return [
        Place(where(), [0, 1]),
        Replicate(where(), [0, 1], zero=2),
        Split("MB", microbatches),
    ]


def rehearse(kinds: list[str], parts: int, replicas: int, **options: Any) -> Any:
    model = Net(kinds)
    given = batches_of(kinds, SIZE * replicas)
    found = piper.rehearse(
        model, functional.mse_loss, strategy(parts, replicas), given, optimizer=SGD, **options
    )
    return found, given


def assert_plain(found: Any, kinds: list[str], given: list[tuple[Tensor, ...]]) -> None:
    reference = Net(kinds)
    losses = plain(reference, given)
    assert found.losses == pytest.approx(losses, rel=1e-12)
    trained = {n: p.data for n, p in reference.named_parameters() if p.grad is not None}
    for name, parameter in trained.items():
        torch.testing.assert_close(found.parameters[name], parameter, rtol=1e-11, atol=1e-13)


@drawn
@pytest.mark.parametrize("seed", range(draws(3, 150)))
def test_microbatches_cut_what_is_the_batch_and_nothing_else(seed: int) -> None:
    kinds, parts, replicas = drawn_case(seed)

    found, given = rehearse(kinds, parts, replicas)

    assert_plain(found, kinds, given)


def test_a_table_that_the_model_looks_up_must_be_named() -> None:
    """Rows of a table could be samples: the model takes any number of them."""
    model, given = Lookup(), lookup_batches()

    with pytest.raises(InputError) as refused:
        piper.rehearse(model, functional.mse_loss, strategy(2, 1), given, optimizer=SGD)

    assert str(refused.value) == (
        "batch: sizes do not say which tensors have the batch as their first dimension: "
        "x, or table\n"
        '  fix: name those that every microbatch gets whole, whole=["mask"], or write whole=[] if '
        "none is; where a loss compares rows with each other, use one microbatch and one replica"
    )


class Masked(nn.Module):
    """Looks its mask up by row, as the models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.last = nn.Embedding(8, SIZE), nn.Linear(SIZE, 1)
        self.double()

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.embed(tokens)
        with piper.annotate("PP"):
            rows = torch.arange(tokens.shape[0])
            return self.last(torch.tanh(x) * mask[rows].unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("shape", [(SIZE,), (SIZE + 1,), (3, SIZE + 1)])
def test_a_mask_of_the_shape_of_the_tokens_is_cut_with_them(shape: tuple[int, ...]) -> None:
    """Also with several choices for each sample."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(8, (3, SIZE, *shape), generator=draw)
    masks = torch.randint(2, (3, SIZE, *shape), generator=draw)
    labels = (drawn_tensor((SIZE, *shape), seed) for seed in range(3))
    given = list(zip(tokens, masks, labels, strict=True))

    found = piper.rehearse(Masked(), functional.mse_loss, strategy(2, 1), given, optimizer=SGD)

    assert found.losses == pytest.approx(plain(Masked(), given), rel=1e-12)


@pytest.mark.parametrize(("parts", "replicas"), [(2, 1), (2, 2)])
def test_what_is_named_stays_whole(parts: int, replicas: int) -> None:
    model, reference, given = Lookup(), Lookup(), lookup_batches(SIZE * replicas)

    found = piper.rehearse(
        model, functional.mse_loss, strategy(parts, replicas), given, optimizer=SGD,
        whole=["table"],
    )  # fmt: skip

    assert found.losses == pytest.approx(plain(reference, given), rel=1e-12)


def test_every_tensor_is_cut_if_you_say_so() -> None:
    """Each microbatch compares its rows with each other, as in a loop over microbatches."""
    model, given = Lookup(), lookup_batches()

    found = piper.rehearse(
        model, functional.mse_loss, strategy(2, 1), given[:1], optimizer=SGD, whole=[]
    )

    halves = zip(*(tensor.chunk(2) for tensor in given[0]), strict=True)
    losses = [functional.mse_loss(Lookup()(x, table), y).item() for x, table, y in halves]
    assert found.losses == pytest.approx([sum(losses) / 2], rel=1e-12)


def test_a_misspelt_name_is_an_error() -> None:
    with pytest.raises(InputError, match="no tensor of the batch is called 'tabel'"):
        piper.rehearse(
            Lookup(), functional.mse_loss, strategy(2, 1), lookup_batches(), whole=["tabel"]
        )
    with pytest.raises(InputError, match="'table' is not a list of names"):
        piper.rehearse(Lookup(), functional.mse_loss, strategy(2, 1), [], whole="table")


def test_an_input_that_the_model_ignores_may_be_anything() -> None:
    model, given = Lookup(), lookup_batches()
    ignored = [({"x": x, "table": y, "unused": torch.zeros(3)}, y) for x, _, y in given]

    found = piper.rehearse(
        model,
        functional.mse_loss,
        strategy(2, 1),
        ignored,
        optimizer=SGD,
        whole=["table", "unused"],
    )

    assert len(found.losses) == 2


class Lookup(nn.Module):
    """Attends to the rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.double()

    def forward(self, x: Tensor, table: Tensor, unused: Tensor | None = None) -> Tensor:
        with piper.annotate("PP"):
            x = torch.tanh(self.first(x))
        with piper.annotate("PP"):
            return self.last((x @ table.T).softmax(-1) @ table)


def lookup_batches(rows: int = SIZE) -> list[tuple[Tensor, ...]]:
    shapes = (rows, SIZE), (SIZE, SIZE), (rows, SIZE)
    return [tuple(drawn_tensor(s, 10 * n + k) for k, s in enumerate(shapes)) for n in range(2)]


def test_tensors_have_the_names_of_the_parameters_that_get_them() -> None:
    model, x = Lookup(), torch.zeros(2)

    assert input_names(model, functional.mse_loss, Batch.of((x, [x, x], {"a": x}, x))) == [
        "x", "table.0", "table.1", "unused.a", "labels",
    ]  # fmt: skip
    assert input_names(model, None, Batch.of((x, x))) == ["x", "table"]
