"""Stages on different numbers of devices, and devices with several replicas, train as one does."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache, partial

import pytest
import torch
from draws import every
from hypothesis import given, settings
from hypothesis import strategies as st
from job.test_rehearsal import a_legal_order, as_filter
from pool import run_on
from replicas import Uneven, assert_same, plain, train_all
from shared_capture import using
from torch.nn import functional
from unequal import Lists, scheduled

from piper import Order, Place, Replicate, Split, Strategy, rehearse, where
from piper.capture import Captured, capture
from piper.ir.placement.replicas import replicas
from piper.strategies import BUILDERS

STAGES, SIZE, STEPS = 4, 2, 3  # rows of a microbatch
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def make() -> Uneven:
    torch.manual_seed(5)
    return Uneven(STAGES, layers=1).double()


@cache
def found() -> Captured:
    example = torch.zeros(SIZE, 7, dtype=torch.float64)
    return capture(make(), functional.mse_loss, (example, example))


def data(rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, rows, 7, generator=generator, dtype=torch.float64)
    return [(draw(), draw()) for _ in range(STEPS)]


@cache
def reference(rows: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The whole batch at once, without Piper."""
    model = make()
    optimizer = ADAMW(p for p in model.parameters() if p.requires_grad)
    losses, norms = [], []
    for x, y in data(rows):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def placed(lists: Sequence[Sequence[int]], zero: int = 0) -> list[Place | Replicate]:
    """Each stage on its list, and a `Replicate` where that has several devices."""
    places = [Place(where(PP=s), row) for s, row in enumerate(lists)]
    devices = [list(dict.fromkeys(row)) for row in lists]
    return [*places, *(Replicate(where(PP=s), one, zero=zero) for s, one in enumerate(devices))]


def parts_of(strategy: Strategy) -> int:
    """Microbatches of all replicas together."""
    lists = replicas(place.devices for place in strategy if isinstance(place, Place))
    return strategy.microbatches * len(lists.lists[0])


def assert_trains_as_plain_pytorch(strategy: Strategy) -> None:
    rows = SIZE * parts_of(strategy)
    losses, norms, parameters = reference(rows)

    with using(found()):
        result = rehearse(make(), functional.mse_loss, strategy, data(rows), optimizer=ADAMW)

    exactly = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-13)
    exactly(torch.tensor(result.losses), torch.tensor(losses))
    exactly(torch.tensor(result.grad_norms), torch.tensor(norms))
    assert set(result.parameters) == set(parameters)
    for name, tensor in parameters.items():
        exactly(result.parameters[name], tensor)


DIFFERENT = [
    ([[0, 2], [1], [1], [1]], 0),
    ([[1], [1], [0, 2], [0, 2]], 3),
    ([[0, 1], [2, 3, 4, 5], [2, 3, 4, 5], [0, 1]], 2),
    ([[0], [1, 2, 3], [1, 2, 3], [4]], 1),
    ([[0, 1, 2], [3, 4], [3, 4], [0, 1, 2]], 3),
    ([[0, 0, 1], [2, 3, 3], [2, 3, 3], [2, 3, 3]], 2),
    ([[0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]], 0),
    ([[0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]], 3),
    ([[0, 0, 1, 2, 2, 3]] * 4, 2),
    ([[0, 1, 2], [1, 0, 3], [0, 1, 2], [1, 0, 3]], 1),
    ([[0, 1], [0], [0, 1], [1, 2]], 0),
    ([[0, 1], [0, 2], [0, 1], [1]], 3),
]


@pytest.mark.parametrize(("lists", "zero"), every(2, DIFFERENT, map(str, DIFFERENT)))
def test_stages_on_different_numbers_of_devices(lists: Sequence[Sequence[int]], zero: int) -> None:
    assert_trains_as_plain_pytorch(Strategy([*placed(lists, zero), Split("MB", 2)]))


@pytest.mark.parametrize(("schedule", "zero"), [(s, k % 4) for k, s in enumerate(BUILDERS)])
def test_every_schedule_with_more_devices_for_one_rank_than_for_the_other(
    schedule: str, zero: int
) -> None:
    lists = {0: [0, 2], 1: [1]} if zero % 2 else {0: [0], 1: [1, 2]}

    assert_trains_as_plain_pytorch(scheduled(schedule, lists, zero=zero))


UNEQUAL: list[tuple[str, int, tuple[int, int]]] = [
    (schedule, (k + n) % 4, counts)
    for n, counts in enumerate([(2, 4), (4, 2), (1, 3), (3, 2)])
    for k, schedule in enumerate(BUILDERS)
]


@pytest.mark.parametrize(("schedule", "zero", "counts"), every(9, UNEQUAL))
def test_every_builder_takes_a_number_of_devices_for_each_rank(
    schedule: str, zero: int, counts: tuple[int, int]
) -> None:
    strategy = BUILDERS[schedule](pp=2, microbatches=2, dp=counts, zero=zero)

    assert {d for p in strategy if isinstance(p, Place) for d in p.devices} == {*range(sum(counts))}
    assert_trains_as_plain_pytorch(strategy)


@pytest.mark.soak
@pytest.mark.parametrize("lists", [{0: [0, 0, 1], 1: [2]}, {0: [0, 1], 1: [1, 2, 3]}], ids=str)
@pytest.mark.parametrize("schedule", BUILDERS)
@pytest.mark.parametrize("zero", range(4))
def test_every_schedule_and_level_with_unequal_ranks(
    schedule: str, zero: int, lists: Lists
) -> None:
    assert_trains_as_plain_pytorch(scheduled(schedule, lists, zero=zero))


def test_processes_with_unequal_replicas_train_as_one_process_on_the_whole_batch() -> None:
    strategies = [
        scheduled("1f1b", {0: [0, 2], 1: [1]}, zero=0),
        scheduled("1f1b", {0: [0], 1: [1, 2]}, zero=3),
        scheduled("zb-h1", {0: [0, 2], 1: [1, 1]}, zero=2),
    ]
    texts = [strategy.to_json() for strategy in strategies]
    parts = 2 * strategies[0].microbatches

    runs = run_on(3, train_all, "uneven", 2, parts, texts)

    for run in zip(*runs, strict=True):
        assert_same(run, plain("uneven", 2, parts, parts))


@st.composite
def unequal(draw: st.DrawFn) -> Strategy:
    """Lists with any number of devices, some of them with more replicas than others."""
    kinds = [draw(a_list(first)) for first in (0, draw(st.sampled_from([1, 10])), 20)]
    lists = [draw(st.sampled_from(kinds)) for _ in range(STAGES)]
    parts = draw(st.sampled_from([1, 2]))
    keep = [
        Replicate(
            where(PP=s), list(dict.fromkeys(row)), zero=draw(st.integers(0, 3)),
            bucket_mb=draw(st.sampled_from([1e-4, 25.0])), gather_ahead=draw(st.integers(0, 2)),
            gather_buffers=draw(st.none() | st.integers(1, 2)),
        )
        for s, row in enumerate(lists)
    ]  # fmt: skip
    halves = draw(st.sets(st.tuples(st.integers(0, STAGES - 1), st.integers(0, parts - 1))))
    order = a_legal_order(parts, halves, random.Random(draw(st.integers())))
    ordered = [Order([as_filter(name) for name in order])] if draw(st.booleans()) else []
    places = [Place(where(PP=s), row) for s, row in enumerate(lists)]
    return numbered(Strategy([*places, *keep, Split("MB", parts), *ordered]))


def a_list(first: int) -> st.SearchStrategy[list[int]]:
    """One to three devices; of three entries, two may be the same device."""
    rows = [[0], [0, 1], [0, 1, 2], [0, 0, 1], [0, 1, 0], [1, 0], [0, 1, 1]]
    return st.sampled_from(rows).map(lambda row: [first + device for device in row])


def numbered(strategy: Strategy) -> Strategy:
    """Devices without gaps."""
    used = dict.fromkeys(d for p in strategy if isinstance(p, Place) for d in p.devices)
    number = {str(device): k for k, device in enumerate(sorted(used))}
    rows = json.loads(strategy.to_json())
    for row in rows:
        if "devices" in row:
            row["devices"] = [number[str(device)] for device in row["devices"]]
    return Strategy.from_json(json.dumps(rows))


@settings(max_examples=6, deadline=None)
@given(unequal())
def test_any_unequal_strategy_trains_as_plain_pytorch(strategy: Strategy) -> None:
    assert_trains_as_plain_pytorch(strategy)
