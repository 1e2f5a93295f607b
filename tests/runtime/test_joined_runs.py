"""Joined forwards train like plain PyTorch, eager or compiled.

Inductor is left out: what it compiles is called.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from draws import SOAK, every, one_of
from plain_loop import plain_losses
from torch import Tensor, fx, nn
from torch.nn import functional

import piper
from piper.capture.kernels import callables
from piper.directives.strategy import as_strategy
from piper.errors import RunError
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.rehearsal import Rehearsal, rehearse, rehearsed
from piper.plan.analyse import kernel_sequences
from piper.runtime import joined_runs

STEPS, ROWS, WIDTH = 3, 16, 4
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    """A layer with dropout; one with batch norm has buffers that the forward updates."""

    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.dropout(functional.silu(self.wide(self.norm(x)))))


class Net(nn.Module):
    """Four layers; the third also reads what the first wrote. The head has the first's weights."""

    def __init__(self, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropout, batch_norm) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        seen = []
        for number, layer in enumerate(self.layers):
            with piper.annotate("L"):
                x = layer(x + seen[0] if number == 2 else x)
                seen.append(x)
        return functional.linear(x, self.first.weight)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return [(draw(), draw()) for _ in range(STEPS)]


def called(module: fx.GraphModule, inside: Any) -> Any:
    """In place of Inductor."""

    def call(given: list[Any]) -> Any:
        arguments = list(given)
        given.clear()
        return module(*arguments)

    return call


@pytest.fixture
def sequences_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all sequences that are made."""
    seen: list[int] = []
    plain = joined_runs.joined

    def joined(program: Any, sequence: Any, *rest: Any) -> Any:
        seen.append(len(sequence.runs))
        return plain(program, sequence, *rest)

    monkeypatch.setattr(callables, "compile_graph", called)
    monkeypatch.setattr(joined_runs, "joined", joined)
    return seen


ONE = [piper.Place(piper.where(), [0]), piper.Split("MB", 2)]
FOUR = [piper.Place(piper.where(), [0])]
BUILT = piper.strategies.BUILDERS
STRATEGIES: dict[str, Any] = {
    "one device": ONE,
    "halves": [*ONE, piper.Order([[piper.where(PASS=p)] for p in ("F", "BI", "BW")])],
    "1f1b": BUILT["1f1b"](pp=2, microbatches=4),
    "zbv, zero 1": BUILT["zbv"](pp=2, dp=2, zero=1, microbatches=2),
    "dualpipev, zero 2": BUILT["dualpipev"](pp=2, dp=2, zero=2, microbatches=4),
    "1f1b, zero 3": BUILT["1f1b"](pp=2, dp=2, zero=3, microbatches=2),
    "recomputed": [*ONE, piper.Remat(piper.where(L=1))],
}


@cache
def job(dropout: float, batch_norm: bool) -> Job:
    """One for each model: it is captured once for each shape of microbatch."""
    model = Net(dropout, batch_norm)
    return Job(model, functional.mse_loss, as_strategy(ONE), Options(optimizer=SGD, device="cpu"))


def trained(strategy: Any, compiled: bool, dropout: float, batch_norm: bool) -> Rehearsal:
    known = job(dropout, batch_norm).under(as_strategy(strategy))
    options = replace(known.options, compiled=compiled)
    return rehearsed(replace(known, options=options), [Batch.of(one) for one in data()])


@one_of(2)
@pytest.mark.parametrize("name", every(4, STRATEGIES))
def test_joined_regions_train_as_regions_alone(name: str, sequences_seen: list[int]) -> None:
    """Eager ones to the last bit: they call the same operators on the same numbers."""
    strategy = STRATEGIES[name]
    for dropout, batch_norm in [(0.5, False)] + [(0.0, True)] * (SOAK and strategy is ONE):
        alone = trained_alone(strategy, dropout, batch_norm)
        assert not sequences_seen
        eager = trained(strategy, False, dropout, batch_norm)
        assert sequences_seen or "zero 3" in name
        sequences_seen.clear()
        compiled = trained(strategy, True, dropout, batch_norm)
        assert sequences_seen or "zero 3" in name
        sequences_seen.clear()

        for found, tolerance in ((eager, 0.0), (compiled, 1e-12)):
            close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
            close(found.losses, alone.losses)
            close(found.grad_norms, alone.grad_norms)
            close(found.parameters, alone.parameters)


def trained_alone(strategy: Any, dropout: float, batch_norm: bool) -> Rehearsal:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_sequences, "MOST_EAGER", 1)
        return trained(strategy, False, dropout, batch_norm)


@one_of(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_joined_regions_train_as_plain_pytorch(sequences_seen: list[int], compiled: bool) -> None:
    """Batch norm sees microbatches, so the plain loop does, too."""
    model = Net(batch_norm=True)
    optimizer, losses = SGD(model.parameters()), []
    for x, y in data():
        halves = zip(x.chunk(2), y.chunk(2), strict=True)
        optimizer.zero_grad()
        parts = []
        for a, b in halves:
            parts.append(functional.mse_loss(model(a), b) / 2)
            parts[-1].backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))

    found = trained(ONE, compiled, 0.0, True)

    assert max(sequences_seen) == 4
    torch.testing.assert_close(list(found.losses), losses, rtol=1e-12, atol=1e-12)
    state = {k: v for k, v in model.state_dict().items() if k in found.parameters}
    assert len(state) == len(found.parameters)
    torch.testing.assert_close(found.parameters, state, rtol=1e-12, atol=1e-12)


class Positions(nn.Module):
    """Layers that make the same table each, and whose gradients are the same sums."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shifts = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for shift in self.shifts:
            with piper.annotate("L"):
                places = torch.arange(WIDTH, dtype=x.dtype)
                x = x + shift + torch.cos(places) + 0.0 * torch.cos(-0.0 * places)
        return x


def test_what_forwards_compute_alike_is_computed_once(
    sequences_seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not so in backwards: sums of gradients are added up in place, so no two may be one tensor."""
    graphs: list[fx.GraphModule] = []
    plain = callables.joined
    monkeypatch.setattr(
        callables, "joined", lambda *given: graphs.append(plain(*given)) or graphs[-1]
    )
    options: Any = {"optimizer": SGD}

    eager = rehearse(Positions(), functional.mse_loss, ONE, data(), **options)
    compiled = rehearse(Positions(), functional.mse_loss, ONE, data(), compiled=True, **options)
    monkeypatch.setattr(kernel_sequences, "MOST_EAGER", 1)
    alone = rehearse(Positions(), functional.mse_loss, ONE, data(), **options)

    torch.testing.assert_close(eager.parameters, alone.parameters, rtol=0, atol=0)
    torch.testing.assert_close(compiled.parameters, alone.parameters, rtol=1e-12, atol=1e-12)
    cosines = (torch.cos, torch.ops.aten.cos.default)
    tables = [sum(n.target in cosines for n in m.graph.nodes) for m in graphs]
    assert tables == [2, 2] and max(sequences_seen) == 3


class Overwritten(nn.Module):
    """Layers that start from the same product, to which each adds something else, in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.shifts = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for shift in self.shifts:
            with piper.annotate("L"):
                total = total + torch.tanh(x @ self.product + x @ shift)
        return total


def test_a_sum_that_overwrites_its_term_does_not_share_it(sequences_seen: list[int]) -> None:
    model = Overwritten()
    optimizer = SGD(model.parameters())
    optimizer_losses = plain_losses(
        optimizer, data(), lambda x, y: functional.mse_loss(model(x), y)
    )

    found = rehearse(Overwritten(), functional.mse_loss, ONE, data(), optimizer=SGD)

    assert max(sequences_seen) == 3
    torch.testing.assert_close(list(found.losses), optimizer_losses, rtol=1e-12, atol=1e-12)


class Looked(nn.Module):
    """Each layer looks up what the batch names. The third has a smaller table."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, WIDTH) for size in (9, 9, 5, 9))

    def forward(self, words: Tensor) -> Tensor:
        total = torch.zeros(())
        for table in self.tables:
            with piper.annotate("L"):
                total = total + table(words).tanh()
        return total


def test_an_error_in_a_sequence_names_the_region(sequences_seen: list[int]) -> None:
    batch = torch.full((4, 2), 7), torch.zeros(4, 2, WIDTH)

    with pytest.raises(RunError, match="run +L2:F@0") as failed:
        rehearse(Looked(), functional.mse_loss, ONE, [batch], optimizer=SGD)

    assert sequences_seen and "index out of range" in str(failed.value)


@pytest.mark.soak
def test_joined_regions_have_fewer_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Inductor: what lies on both sides of a border becomes one kernel."""
    from torch._inductor import config, metrics

    counts = []
    for most in (1, 8):
        monkeypatch.setattr(kernel_sequences, "MOST", most)
        metrics.reset()
        with config.patch(force_disable_caches=True):  # monkeypatch would leave it unreadable
            rehearse(Net(), functional.mse_loss, FOUR, data()[:1], optimizer=SGD, compiled=True)
        counts.append(metrics.generated_kernel_count)

    assert counts[1] < counts[0]
