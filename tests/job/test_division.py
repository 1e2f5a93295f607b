"""Strategies that divide weights or tokens, in threads: every schedule against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from dense_net import PARTS, STRATEGIES, WIDTH, agree, batches, job, run

from piper import Place, Replicate, Shard, Split, Stage, Strategy, strategies, where
from piper.errors import DirectiveError, PassError
from piper.ir.placement.placements import Cut
from piper.job.batch.batch import Batch
from piper.job.compile.division import division_requests, feeds_of
from piper.plan.analyse.memory import peak

LONGER = ("gpipe", "interleaved", "zbv", "replicas", "1f1b", "dualpipev")
EVERY = [pytest.param(n, marks=pytest.mark.soak) if n in LONGER else n for n in STRATEGIES]


@pytest.mark.parametrize("name", EVERY)
def test_weights_are_divided_under_every_schedule(name: str) -> None:
    agree(run(STRATEGIES[name](tp=2)))


@pytest.mark.parametrize("name", ["zb-h1", pytest.param("dualpipe", marks=pytest.mark.soak)])
def test_tokens_are_divided_under_any_schedule(name: str) -> None:
    agree(run(STRATEGIES[name](cp=2)))


@pytest.mark.soak
def test_four_devices_divide_a_model() -> None:
    agree(run(STRATEGIES["dualpipev"](tp=4)))


@pytest.mark.soak
def test_some_layers_are_divided_and_others_not() -> None:
    """The others are computed by all devices of a group alike."""
    devices, groups = [0, 1, 2, 3], [[0, 1], [2, 3]]
    part = Shard(where(L=1), groups, what="weights")
    strategy = [Place(where(), devices), Replicate(where(), devices, zero=1), part, Split("MB", 2)]

    agree(run(Strategy(strategy)))


def test_a_plan_says_how_parameters_are_cut() -> None:
    plan = {"layers.*.up": "colwise", "layers.0.down.weight": "rowwise"}
    shard = Shard(where(), [0, 1], what="weights", plan=plan)
    program = (Place(where(), [0, 1]), shard)
    model = job().capture_whole(Batch.of(batches()[0]).part(0, PARTS)).model

    (request,) = division_requests(model, program)

    assert dict(request.seeds) == {
        "layers.0.up.weight": Cut(0), "layers.0.up.bias": Cut(0), "layers.1.up.weight": Cut(0),
        "layers.1.up.bias": Cut(0), "layers.0.down.weight": Cut(1),
    }  # fmt: skip


def test_a_plan_that_names_nothing_is_refused() -> None:
    shard = Shard(where(), [0, 1], what="weights", plan={"layer.*.up": "colwise"})
    program = [Place(where(), [0, 1]), shard, Split("MB", 4)]

    with pytest.raises(DirectiveError) as refused:
        run(Strategy(program))

    assert str(refused.value) == (
        "shard (directive 2 of 3): the plan names layer.*.up, and no parameter there is called so\n"
        "  fix: write names of parameters or modules of the model; * stands for any text"
    )


def test_stages_of_a_divided_model_are_those_of_the_whole_one() -> None:
    found = job().under(STRATEGIES["gpipe"](tp=2))

    program = found.directives(Batch.of(batches()[0]))

    assert next(one for one in program if isinstance(one, Stage)).stages == (1, 1)


def test_a_group_is_one_replica() -> None:
    feeds = feeds_of(strategies.dualpipe(pp=2, microbatches=4, tp=2, dp=3))

    assert (len(feeds.feeds), feeds.parts, feeds.ways) == (3, 2, 2)


def test_groups_without_replicate_are_refused() -> None:
    program = [Place(where(), [0, 1, 2, 3]), Shard(where(), [[0, 1], [2, 3]], what="weights")]

    with pytest.raises(PassError, match="nothing keeps its replicas equal"):
        run(Strategy([*program, Split("MB", 2)]))


BOTH = [pytest.param(n, marks=pytest.mark.soak) if n != "dualpipev" else n for n in STRATEGIES]


@pytest.mark.parametrize("name", BOTH)
def test_tokens_and_weights_are_divided_together(name: str) -> None:
    agree(run(STRATEGIES[name](tp=2, cp=2)))


def by_both(weights: list[list[int]], tokens: list[list[int]], layer: int | None = None) -> list:
    """Everything is divided twice, or one layer."""
    here = where() if layer is None else where(L=layer)
    shards = Shard(here, weights, what="weights"), Shard(here, tokens, what="tokens")
    return [Place(where(), [0, 1, 2, 3]), *shards, Split("MB", 4)]


@pytest.mark.soak
def test_the_devices_of_a_grid_may_be_counted_either_way() -> None:
    agree(run(Strategy(by_both(tokens=[[0, 1], [2, 3]], weights=[[0, 2], [1, 3]]))))


@pytest.mark.soak
def test_one_layer_is_divided_twice_and_the_others_are_whole() -> None:
    agree(run(Strategy(by_both([[0, 1], [2, 3]], [[0, 2], [1, 3]], layer=1))))


def test_regions_that_are_divided_twice_beside_others_divided_once_are_refused() -> None:
    once = Shard(where(L=0), [0, 1, 2, 3], what="weights")
    program = by_both([[0, 1], [2, 3]], [[0, 2], [1, 3]], layer=1)

    with pytest.raises(DirectiveError) as refused:
        run(Strategy([*program[:-1], once, program[-1]]))

    assert str(refused.value) == (
        "shard: L0 is divided in another way than regions that have two `Shard`s\n"
        "  fix: divide all of them by tokens and by weights alike, or leave some whole"
    )


def test_a_device_holds_its_part_of_every_matrix() -> None:
    strategy = strategies.one_f_one_b(pp=1, microbatches=4, tp=2)
    captured, compiled = job().under(strategy).compile(Batch.of(batches()[0]))

    held = peak(compiled.dag, compiled.plans[1], optimizer=1.0).held

    named = dict(job().model.named_parameters())
    cut = {p.name for bucket in captured.model.buckets.values() for p in bucket.parameters
           if isinstance(p.placement, Cut)}  # fmt: skip
    bytes_of = {name: p.nbytes // (2 if name in cut else 1) for name, p in named.items()}
    assert {name for name, p in named.items() if p.dim() == 2} <= cut
    assert (held["parameters"], held["optimizer"]) == (sum(bytes_of.values()),) * 2


def test_a_run_says_what_is_not_divided(caplog: pytest.LogCaptureFixture) -> None:
    strategy = strategies.one_f_one_b(pp=1, microbatches=4, tp=8)

    with caplog.at_level("INFO", logger="piper"):
        job().under(strategy).compile(Batch.of(batches()[0]))

    (line,) = (one for one in caplog.messages if one.startswith("not divided"))
    assert line.startswith(
        "not divided, every device computes all of it: scaled_dot_product_attention (dense_net.py"
    )
    assert line.endswith(") x2, which has 4 heads: not a multiple of tp=8")


def kept(length: int, **how: int) -> int:
    """Bytes that one device keeps of one microbatch for its backward."""
    tokens = torch.zeros(PARTS, length, dtype=torch.int64)
    strategy = strategies.one_f_one_b(pp=1, microbatches=PARTS, **how)
    model = job().under(strategy).capture(Batch.of((tokens, tokens))).model
    inputs = {region.inputs[k] for region in model.regions for k in region.backward_inputs}
    saved = sum(spec.nbytes for region in model.regions for spec in region.saved)
    return saved + sum(model.values[name].nbytes for name in inputs)


@pytest.mark.soak
def test_what_a_device_keeps_falls_with_the_devices_that_divide_tokens() -> None:
    """Besides its share, it keeps what attention gives in two orders, once per layer."""
    length = 64
    hidden, whole = length * WIDTH * 8, kept(length)

    for ways in (2, 4):
        twice = 2 * hidden
        assert kept(length, cp=ways) <= (1.01 * whole + 1.25 * twice) / ways
