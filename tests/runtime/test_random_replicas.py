"""Random strategies with replicas: levels, buckets, groups, streams and schedules at random."""

from __future__ import annotations

import random
from functools import cache, partial

import torch
from draws import drawn, draws
from hypothesis import given, settings
from hypothesis import strategies as st
from job.test_rehearsal import a_legal_order, as_filter
from replicas import Uneven
from shared_capture import using
from torch.nn import functional

from piper import Order, Place, Replicate, Split, Strategy, rehearse, where
from piper.capture import Captured, capture

STAGES, ROWS, STEPS = 4, 24, 3
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def make() -> Uneven:
    torch.manual_seed(5)
    return Uneven(STAGES, layers=2).double()


@cache
def found(size: int) -> Captured:
    example = torch.zeros(size, 7, dtype=torch.float64)
    return capture(make(), functional.mse_loss, (example, example))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, ROWS, 7, generator=generator, dtype=torch.float64)
    return [(draw(), draw()) for _ in range(STEPS)]


@cache
def reference() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The whole batch at once, without Piper."""
    model = make()
    optimizer = ADAMW(p for p in model.parameters() if p.requires_grad)
    losses, norms = [], []
    for x, y in batches():
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@st.composite
def replicated(draw: st.DrawFn) -> Strategy:
    """Every stage on its own devices or beside others, its own level, buckets and streams."""
    drawn = draw(st.lists(st.integers(0, 2), min_size=STAGES, max_size=STAGES))
    number = {device: k for k, device in enumerate(dict.fromkeys(drawn))}
    count, dp, parts = len(number), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3]))
    homes = [[number[d] + count * copy for copy in range(dp)] for d in drawn]
    places = [Place(where(PP=s), home) for s, home in enumerate(homes)]
    keep = [draw(kept(s, home)) for s, home in enumerate(homes)]
    halves = draw(st.sets(st.tuples(st.integers(0, STAGES - 1), st.integers(0, parts - 1))))
    order = a_legal_order(parts, halves, random.Random(draw(st.integers())))
    ordered = [Order([as_filter(name) for name in order])] if draw(st.booleans()) else []
    split = Split("MB", parts)
    rest = draw(st.permutations(keep))
    if draw(st.booleans()):
        return Strategy([*rest, *places, split, *ordered])
    return Strategy([*places, split, *rest, *ordered])


@st.composite
def kept(draw: st.DrawFn, stage: int, home: list[int]) -> Replicate:
    groups = [home[:2], home[2:]] if len(home) == 4 and draw(st.booleans()) else home
    zero = draw(st.integers(0, 3))
    return Replicate(
        where(PP=stage),
        groups,
        zero=zero,
        reduce=draw(st.sampled_from(["each", "once"])) if zero == 3 else None,
        bucket_mb=draw(st.sampled_from([1e-6, 1e-4, 25.0])),
        reduce_stream=draw(st.sampled_from(["dp", "pp", "a"])),
        gather_stream=draw(st.sampled_from(["dp", "a", "b"])),
        gather_ahead=draw(st.integers(0, 3)),
        gather_buffers=draw(st.none() | st.integers(1, 3)),
    )


@drawn
@settings(max_examples=draws(3, 100), deadline=None)
@given(replicated())
def test_any_replicated_strategy_trains_as_plain_pytorch(strategy: Strategy) -> None:
    losses, norms, parameters = reference()
    parts = strategy.microbatches * len(next(iter(places_of(strategy))).devices)

    with using(found(ROWS // parts)):
        result = rehearse(make(), functional.mse_loss, strategy, batches(), optimizer=ADAMW)

    exactly = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-13)
    exactly(torch.tensor(result.losses), torch.tensor(losses))
    exactly(torch.tensor(result.grad_norms), torch.tensor(norms))
    assert set(result.parameters) == set(parameters)
    for name, tensor in parameters.items():
        exactly(result.parameters[name], tensor)


def places_of(strategy: Strategy) -> list[Place]:
    return [directive for directive in strategy if isinstance(directive, Place)]
