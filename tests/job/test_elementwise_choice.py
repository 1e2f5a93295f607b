"""What elementwise operators compute is not kept where many microbatches wait for backwards."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from draws import levels_of, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper import Place, Remat, Replicate, Split, Strategy, where
from piper.job.batch.batch import Batch
from piper.job.compile.compiler import Compiled
from piper.job.job import Job
from piper.job.memory import elementwise_choice
from piper.job.options import Options
from piper.job.programs.rehearsal import rehearsed
from piper.plan.analyse.memory import peak
from piper.strategies import BUILDERS

STAGES, WIDTH, HIDDEN, ROWS, PARTS, BYTES = 4, 4, 12, 16, 8, 8
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
EXACTLY = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-13)
KEEP_ALL = Remat(where(), keep=1.0)
KEPT = ROWS // PARTS * HIDDEN * BYTES  # one activation of a microbatch, as wide as a SwiGLU


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise_choice, "LEAST", 1)


class Gated(nn.Module):
    """A SwiGLU in each stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        linear = partial(nn.Linear, bias=False, dtype=torch.float64)
        self.gates, self.ups = (
            nn.ModuleList(linear(WIDTH, HIDDEN) for _ in range(STAGES)) for _ in range(2)
        )
        self.downs = nn.ModuleList(linear(HIDDEN, WIDTH) for _ in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            with piper.annotate("PP"):
                x = x + down(functional.silu(gate(x)) * up(x))
        return x


@cache
def data(steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    draw = partial(torch.randn, ROWS, WIDTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    return [(draw(generator=generator), draw(generator=generator)) for _ in range(steps)]


@cache
def job() -> Job:
    one = Strategy([Place(where(), [0])])
    return Job(Gated(), functional.mse_loss, one, Options(optimizer=ADAMW, device="cpu"))


def pipeline(name: str = "1f1b", **options: object) -> Strategy:
    return Strategy(BUILDERS[name](pp=STAGES, microbatches=PARTS, **options))


def compiled(strategy: Strategy) -> Compiled:
    return job().under(strategy).compile(Batch.of(data()[0]))[1]


def recomputed(found: Compiled) -> list[str]:
    return [region.id for region in found.dag.model.regions if region.recomputes]


def held(found: Compiled, device: int) -> int:
    plan = next(plan for plan in found.plans if plan.device == device)
    return peak(found.dag, plan).held["activations"]


def saved(found: Compiled) -> int:
    """Bytes of a microbatch that wait for backwards."""
    return sum(spec.nbytes for one in found.dag.model.regions for spec in one.saved)


def test_half_of_a_swiglu_is_kept_for_each_microbatch_that_waits() -> None:
    """Kept are x, and the results of both products: neither silu(gate) nor what `down` reads."""
    lean, whole = compiled(pipeline()), compiled(pipeline(remat=1.0))
    first, kept = lean.dag.model.by_id["PP0"], whole.dag.model.by_id["PP0"]

    assert sum(spec.nbytes for spec in kept.saved) == 4 * KEPT
    assert sum(spec.nbytes for spec in first.saved) == 2 * KEPT
    assert first.recomputes and first.recomputes.frees == 2 * KEPT
    assert first.backward_inputs == kept.backward_inputs
    for device, waiting in enumerate((4, 3, 2)):  # full when the first backward begins
        assert held(whole, device) - held(lean, device) == waiting * 2 * KEPT


def test_a_stage_whose_backward_follows_at_once_keeps_everything() -> None:
    assert recomputed(compiled(pipeline())) == ["PP0", "PP1", "PP2"]


class Layered(Gated):
    """Two layers in each of two stages, each of them a region."""

    def forward(self, x: Tensor) -> Tensor:
        for k, (gate, up, down) in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            with piper.annotate("PP", k // 2), piper.annotate("L"):
                x = x + down(functional.silu(gate(x)) * up(x))
        return x


def test_layers_of_the_last_stage_wait_for_those_behind_them() -> None:
    """And all of them for the loss, which is a region of its own and keeps everything."""
    kept = Strategy(BUILDERS["1f1b"](pp=2, microbatches=PARTS, remat=1.0))
    mine = Job(Layered(), functional.mse_loss, kept, Options(optimizer=ADAMW, device="cpu"))
    default = mine.under(Strategy(BUILDERS["1f1b"](pp=2, microbatches=PARTS)))
    whole, lean = (one.compile(Batch.of(data()[0]))[1] for one in (mine, default))

    assert recomputed(lean) == ["PP0.L0", "PP0.L1", "PP1.L2", "PP1.L3"]
    assert held(whole, 1) - held(lean, 1) == 2 * 2 * KEPT


@one_of(2)
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zbv", "dualpipev"])
def test_it_trains_as_plain_pytorch(name: str) -> None:
    """With whole and with split backwards, one stage or two on a device."""
    two = name in ("interleaved-1f1b", "zbv", "dualpipev")
    trains_as_plain_pytorch(
        Strategy(BUILDERS[name](pp=STAGES // 2 if two else STAGES, microbatches=PARTS))
    )


def trains_as_plain_pytorch(strategy: Strategy) -> None:
    found = rehearsed(job().under(strategy), [Batch.of(one) for one in data()])
    losses, parameters = reference()

    assert recomputed(compiled(strategy))
    EXACTLY(torch.tensor(found.losses), torch.tensor(losses))
    for parameter, tensor in parameters.items():
        EXACTLY(found.parameters[parameter], tensor)


def replicas(zero: int, parts: int = 2, **options: object) -> Strategy:
    both = [0, 1]
    given = Replicate(where(), both, zero=zero, **options)  # type: ignore[arg-type]
    return Strategy([Place(where(), both), given, Split("MB", parts)])


@pytest.mark.parametrize(("zero", "parts"), levels_of([2, 3], [1, 2]))
def test_replicas_that_shard_more_than_optimizer_state_keep_less(zero: int, parts: int) -> None:
    """All layers but the last, whose backward follows at once."""
    lean, whole = compiled(replicas(zero, parts)), compiled(replicas(zero, parts) + [KEEP_ALL])
    freed = (STAGES - 1) * 2 * KEPT * PARTS // parts

    assert recomputed(lean) == ["PP0", "PP1", "PP2"]
    assert saved(whole) - saved(lean) == freed
    assert elementwise_choice.most_held(lean) < elementwise_choice.most_held(whole)
    trains_as_plain_pytorch(replicas(zero, parts))


def test_zero_2_that_became_zero_1_keeps_less_too() -> None:
    """With the memory known, gradients are reduced once, as with zero=1."""
    limited = replace(job(), options=replace(job().options, memory_gib=1.0))
    found = limited.under(replicas(2)).compile(Batch.of(data()[0]))[1]

    assert [one.zero for one in found.program if isinstance(one, Replicate)] == [1]
    assert recomputed(found)


@cache
def reference() -> tuple[list[float], dict[str, Tensor]]:
    model = Gated()
    optimizer = ADAMW(model.parameters())
    losses = plain_losses(optimizer, data(), lambda x, y: functional.mse_loss(model(x), y))
    return losses, {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize(
    "strategy",
    [
        pipeline(remat=1.0),
        pipeline() + [Remat(where(PP=3))],
        Strategy(BUILDERS["1f1b"](pp=STAGES, microbatches=1)),
        Strategy([Place(where(), [0]), Split("MB", PARTS)]),
        replicas(0),
        replicas(1),
        replicas(3) + [KEEP_ALL],
    ],
    ids=["all is kept", "own choice", "one microbatch", "one device", "zero=0", "zero=1", "zero=3"],
)
def test_who_asks_for_something_else_or_holds_one_microbatch_keeps_everything(
    strategy: Strategy,
) -> None:
    regions = compiled(strategy).dag.model.regions

    assert not any(one.recomputes and one.recomputes.keep == ("costly",) for one in regions)


def test_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "piper"):
        compiled(pipeline())

    assert (
        "PP0, PP1, PP2 recompute results of elementwise operators and norms: 1.1 KiB less per "
        "microbatch (Remat(where(), keep=1.0) keeps everything)"
    ) in caplog.text


def test_small_activations_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise_choice, "LEAST", 2 * KEPT + 1)
    assert not recomputed(compiled(pipeline()))
