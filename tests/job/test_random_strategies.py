"""Whole strategies at random: cuts, sizes of microbatches and replicas, groups, unequal ranks and
orders with messages together.

    python tests/job/test_random_strategies.py 0 200

Each trains as plain PyTorch, or is refused with a reason. Nothing else may happen. Of the accepted
ones, mutants are drawn: each trains as before, or is refused.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from draws import drawn, draws
from message_orders import Named
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import piper
from piper import Order, Place, Replicate, Split, Strategy
from piper.errors import PiperError
from piper.job.batch.batch import Batch
from piper.job.compile.division import feeds_of
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.rehearsal import Rehearsal, rehearsed
from piper.strategies import BUILDERS

LAYERS, WIDTH, STEPS = 6, 3, 2
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
EXACTLY = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-13)


class Layered(nn.Module):
    """Layers of different weight, one of them frozen; a matrix that the first and last share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 2 + k) for k in range(LAYERS))
        self.back = nn.ModuleList(nn.Linear(2 + k, WIDTH) for k in range(LAYERS))
        self.wide[2].requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.tied
        for wide, back in zip(self.wide, self.back, strict=True):
            with piper.annotate("L"):
                x = x + torch.tanh(back(wide(x)))
        return x @ self.tied.t()


@cache
def job() -> Job:
    """One for all strategies: the model is captured once for each size of microbatch."""
    one = Strategy([Place(piper.where(), [0])])
    return Job(Layered(), mse_loss, one, Options(optimizer=ADAMW, device="cpu"))


@cache
def data(rows: int) -> list[tuple[Tensor, Tensor]]:
    draw = partial(torch.randn, rows, WIDTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(rows)
    return [(draw(generator=generator), draw(generator=generator)) for _ in range(STEPS)]


@cache
def reference(rows: int) -> tuple[list[float], dict[str, Tensor]]:
    """The whole batch at once, without Piper."""
    model = Layered()
    optimizer = ADAMW(p for p in model.parameters() if p.requires_grad)
    losses = plain_losses(optimizer, data(rows), lambda x, y: mse_loss(model(x), y))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def composition(chance: random.Random, total: int, parts: int) -> list[int]:
    """A random way to write a number as a sum."""
    ends = sorted(chance.sample(range(1, total), parts - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, total], strict=True)]


def a_strategy(chance: random.Random) -> Strategy:
    """Any builder with any of its options."""
    name, pp = chance.choice(list(BUILDERS)), chance.choice([1, 2, 2, 3])
    microbatches = chance.randint(1, 4)
    options: dict[str, Any] = {"zero": chance.randrange(4)}
    options["dp"] = chance.choice([1, 2, [chance.randint(1, 3) for _ in range(pp)]])
    if chance.random() < 0.5:
        options["microbatch_sizes"] = [chance.randint(1, 3) for _ in range(microbatches)]
    if chance.random() < 0.5:
        options |= {"bucket_mb": 1e-4, "gather_ahead": chance.randint(0, 2), "gather_buffers": 1}
    if chance.random() < 0.3:
        options["speeds"] = [chance.choice([1, 2, 3.5]) for _ in range(pp)]
    if chance.random() < 0.3:
        options["remat"] = chance.choice([True, "matmuls"])
    built = BUILDERS[name](pp=pp, microbatches=microbatches, **options)
    stages = sum(isinstance(one, Place) for one in built)
    if chance.random() < 0.5 and stages <= LAYERS:
        options["stages"] = composition(chance, LAYERS, stages)
        built = BUILDERS[name](pp=pp, microbatches=microbatches, **options)
    return built


def grouped(strategy: Strategy, chance: random.Random) -> Strategy:
    """Shards within groups of devices, where a stage has an even number of them."""
    if chance.random() < 0.6:
        return strategy
    return Strategy(
        replace(one, devices=(one.devices[::2], one.devices[1::2]))  # type: ignore[misc]
        if isinstance(one, Replicate) and len(one.devices) % 2 == 0 and len(one.devices) > 2
        else one
        for one in strategy
    )


def split_of(strategy: Strategy) -> Split:
    (found,) = (one for one in strategy if isinstance(one, Split))
    return found


def with_rows(strategy: Strategy, chance: random.Random) -> Strategy:
    """Replicas with different numbers of rows, most of them such that microbatches can be cut."""
    feeds, split = feeds_of(strategy).feeds, split_of(strategy)
    if len(feeds) == 1 or chance.random() < 0.5:
        return strategy
    least = sum(split.sizes) if split.sizes else split.n
    several = partial(chance.randint, least, 2 * least + 1)
    draw = chance.choice([lambda: least * chance.randint(1, 3), several])
    return Strategy(
        replace(one, replica_sizes=[draw() for _ in feeds]) if one is split else one
        for one in strategy
    )


def rows_of(strategy: Strategy) -> int:
    """A batch that every replica can cut."""
    found, split = feeds_of(strategy), split_of(strategy)
    if split.unequal:
        return found.parts * sum(split.unequal)
    return found.parts * len(found.feeds) * (sum(split.sizes) if split.sizes else 2 * split.n)


def trained(strategy: Strategy, rows: int) -> Rehearsal:
    return rehearsed(job().under(strategy), [Batch.of(one) for one in data(rows)])


def with_orders(strategy: Strategy, rows: int, chance: random.Random) -> Strategy:
    """An order with messages on top, if one that is drawn is accepted."""
    known = job().under(strategy)
    batch = known.rows.divided(Batch.of(data(rows)[0]))[0]
    named = Named(known.compile(batch)[1].dag, chance)
    orders = [one for one in (named.drawn(3), named.drawn(4, anywhere=True)) if one]
    found = Strategy([*strategy, *orders])
    try:
        known.under(found).compile(batch)
    except PiperError:
        return strategy
    return found


def mutated(strategy: Strategy, chance: random.Random) -> Strategy:
    """One directive is dropped, doubled, moved or changed."""
    rows = list(strategy)
    k, other = chance.randrange(len(rows)), chance.randrange(len(rows))
    match chance.choice(["drop", "double", "move", "order", "device", "rows"]):
        case "drop":
            del rows[k]
        case "double":
            rows.insert(k, rows[k])
        case "move":
            rows.insert(other, rows.pop(k))
        case "order":
            orders = [k for k, one in enumerate(rows) if isinstance(one, Order)]
            at = chance.choice(orders)
            slots = list(rows[at].slots)
            chance.shuffle(slots)
            rows[at] = replace(rows[at], slots=tuple(slots))
        case "device":
            places = [k for k, one in enumerate(rows) if isinstance(one, Place)]
            at = chance.choice(places)
            rows[at] = replace(rows[at], devices=(chance.randrange(3),))
        case "rows":
            at = rows.index(split_of(strategy))
            sizes = [chance.randint(1, 6) for _ in range(chance.randint(1, 3))]
            rows[at] = replace(rows[at], replica_sizes=sizes)
    return Strategy(rows)


def outcome(strategy: Strategy, rows: int) -> str:
    """Equal, or why it was refused. A difference is an AssertionError, all else another error."""
    try:
        found = trained(strategy, rows)
    except PiperError as refused:
        assert "fix:" in str(refused), refused
        return str(refused).splitlines()[0]
    losses, parameters = reference(rows)
    EXACTLY(torch.tensor(found.losses), torch.tensor(losses))
    for name, tensor in parameters.items():
        EXACTLY(found.parameters[name], tensor)
    return "equal"


def a_case(seed: int) -> tuple[str, str]:
    """The outcomes of a strategy, and of a mutant."""
    chance = random.Random(seed)
    try:
        strategy = with_rows(grouped(a_strategy(chance), chance), chance)
    except PiperError as refused:
        assert "fix:" in str(refused), refused
        return str(refused).splitlines()[0], ""
    rows = rows_of(strategy)
    first = outcome(strategy, rows)
    if first != "equal":
        return first, ""
    ordered = with_orders(strategy, rows, chance)
    assert outcome(ordered, rows) == "equal"
    mutant = mutated(ordered, chance)
    with suppress(ValueError):  # without its `Split`, or with two
        rows = rows_of(mutant)
    return first, outcome(mutant, rows)


@drawn
@pytest.mark.parametrize("seed", range(draws(1, 200)))
def test_a_strategy_trains_as_plain_pytorch_or_is_refused(seed: int) -> None:
    a_case(seed)


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:3])
    seen: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            strategy, mutant = a_case(seed)
        except Exception as error:
            strategy, mutant = f"OTHER seed {seed}: {type(error).__name__} {str(error)[:300]}", ""
        seen[f"strategy: {strategy if strategy == 'equal' else strategy[:120]}"] += 1
        seen[f"mutant: {mutant[:120]}"] += bool(mutant)
        print(seed, strategy[:200], "|", mutant[:200], flush=True)
    print("\n".join(f"{count:5} {what}" for what, count in seen.most_common()))
