"""Experts in stages whose weights or tokens are divided, in threads, against plain PyTorch."""

from __future__ import annotations

from copy import deepcopy
from functools import cache, partial

import experts
import pytest
import torch
from torch import nn

from piper import Place, Shard, Split, Strategy, strategies, where
from piper.directives import apply
from piper.errors import CaptureError
from piper.ir.placement.placements import Cut
from piper.ir.training import training_dag
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.memory import elementwise_choice
from piper.job.options import Options
from piper.job.programs.rehearsal import Rehearsal, rehearsed

STAGES, PARTS, LENGTH, HIDDEN, MAX_NORM, STEPS = 2, 4, 4, 8, 0.5, 3
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small experts recompute as large ones do."""
    monkeypatch.setattr(elementwise_choice, "LEAST", 1)


@cache
def job(routing: str) -> Job:
    """One for all tests, which share its captures."""
    torch.manual_seed(3)
    one = Strategy([Place(where(), [0])])
    model = experts.Mixed(STAGES, routing)
    for block in model.blocks:  # with a hidden size that can be cut
        block.into = nn.Parameter(torch.randn(experts.EXPERTS, experts.WIDTH, HIDDEN) / 2)
        block.back = nn.Parameter(torch.randn(experts.EXPERTS, HIDDEN, experts.WIDTH) / 2)
    model.double()
    return Job(model, experts.loss, one, Options(optimizer=ADAMW, max_norm=MAX_NORM))


@cache
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(2)
    size = (PARTS, LENGTH, experts.WIDTH)
    rand = partial(torch.randn, size, generator=draw, dtype=torch.float64)
    return [(rand(), rand()) for _ in range(STEPS)]


@cache
def plain(routing: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The whole batch at once, without Piper."""
    model = deepcopy(job(routing).model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses, norms = ADAMW(trained), [], []
    for x, y in batches():
        optimizer.zero_grad()
        loss = experts.loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(trained, MAX_NORM).item())
        optimizer.step()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def run(routing: str, strategy: Strategy) -> Rehearsal:
    return rehearsed(job(routing).under(strategy), [Batch.of(batch) for batch in batches()])


def agree(found: Rehearsal, routing: str) -> None:
    losses, norms, parameters = plain(routing)
    assert found.losses == pytest.approx(losses, rel=1e-12)
    assert found.grad_norms == pytest.approx(norms, rel=1e-12)
    for name, wanted in parameters.items():
        torch.testing.assert_close(found.parameters[name], wanted, rtol=1e-11, atol=1e-12)


STRATEGIES = {
    "one team": strategies.one_f_one_b(pp=2, microbatches=4, tp=2, ep=2),
    "across teams": strategies.zb_h1(pp=2, microbatches=2, dp=2, tp=2, ep=4, zero=1),
    "fewer experts": strategies.one_f_one_b(pp=2, microbatches=2, dp=2, tp=2, ep=2, zero=3),
    "dualpipev": strategies.dualpipev(pp=1, microbatches=2, dp=2, tp=2, ep=2, zero=2),
    "dualpipe": strategies.dualpipe(pp=2, microbatches=2, tp=2, ep=4, zero=1),
    "tokens": strategies.one_f_one_b(pp=2, microbatches=2, dp=2, cp=2, ep=2, zero=2),
    "matrices": strategies.zb_h1(pp=2, microbatches=4, tp=2, zero=1),  # experts' weights are cut
    "both axes": strategies.one_f_one_b(pp=2, microbatches=4, tp=2, cp=2, ep=4),
    "both axes, fewer experts": strategies.zb_h1(pp=1, microbatches=4, tp=2, cp=2, ep=2, zero=1),
    "no replicate": strategies.one_f_one_b(pp=2, microbatches=4, tp=4, ep=2),
}


DEFAULT = [("across teams", "skewed")]
EVERY = [
    pytest.param(name, routing, marks=() if (name, routing) in DEFAULT else pytest.mark.soak)
    for name in STRATEGIES
    for routing in experts.ROUTINGS
]


@pytest.mark.parametrize(("name", "routing"), EVERY)
def test_experts_in_divided_stages_train_as_plain_pytorch(name: str, routing: str) -> None:
    agree(run(routing, STRATEGIES[name]), routing)


def test_experts_without_a_pipeline_do_not_keep_what_elementwise_operators_make() -> None:
    """Their regions hold one microbatch at a time, as all others here do."""
    strategy = strategies.one_f_one_b(pp=1, microbatches=2, dp=2, ep=2)
    mine = job("skewed").under(strategy)
    first = mine.rows.divided(Batch.of(batches()[0]))[0]
    regions = mine.compile(first)[1].dag.model.regions

    agree(run("skewed", strategy), "skewed")
    assert [one.id for one in regions if one.recomputes] == ["PP0.EP0", "PP1.EP1"]
    assert all(one.recomputes.frees > 0 for one in regions if one.recomputes)


def test_rows_that_do_not_divide_are_refused() -> None:
    batch = tuple(tensor[:, :3] for tensor in batches()[0])  # 3 tokens, 2 choices, 4 devices

    with pytest.raises(CaptureError) as refused:
        job("spread").under(STRATEGIES["no replicate"]).compile(Batch.of(batch))

    assert "the 6 rows of a region of experts cannot be divided evenly over 4" in str(refused.value)


def test_experts_beside_regions_that_are_not_divided_are_refused() -> None:
    devices = [0, 1]
    strategy = Strategy(
        [
            Place(where(), devices),
            Shard(where(PP=0), devices, what="weights"),
            Shard(where(EP="*"), devices),
            Split("MB", 4),
        ]
    )

    with pytest.raises(CaptureError, match="their neighbours are not"):
        run("spread", strategy)


def test_both_orders_of_the_two_shards_give_the_same_dag() -> None:
    devices = [0, 1]
    both = [Shard(where(EP="*"), devices), Shard(where(), devices, what="weights")]
    captured = job("spread").capture_whole(Batch.of(batches()[0]))

    dags = [apply([Place(where(), devices), *order], training_dag(captured.model))
            for order in (both, both[::-1])]  # fmt: skip

    assert dags[0].divisions == dags[1].divisions
    assert set(dags[0].shardings) == {r for r in dags[0].places if "EP" in r}
    assert not set(dags[0].divisions) & set(dags[0].shardings)


def test_matrices_of_experts_are_cut_where_experts_are_not_divided() -> None:
    captured = job("skewed").under(STRATEGIES["matrices"]).capture(Batch.of(batches()[0]))

    placed = {p.name: p.placement for b in captured.model.buckets.values() for p in b.parameters}

    assert placed["blocks.0.into"] == Cut(2)
    assert placed["blocks.0.back"] == Cut(1)
