"""Random legal strategies on made-up models: any placement, any order that the dataflow allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st
from synthetic import chain

from piper.directives import Directive, Order, Place, Split
from piper.ir.filters import Filter, where
from piper.ir.model import Model

Pass = tuple[str, int, int]  # phase, stage, microbatch


@dataclass(frozen=True)
class Program:
    """A model and a strategy for it, with all that the test must know about them."""

    stages: int
    device_of: tuple[int, ...]
    microbatches: int
    skips: tuple[tuple[int, int], ...] = ()
    tied: bool = False
    clip: bool = False
    split: bool = True  # without it there is one microbatch and no MB
    halved: frozenset[tuple[int, int]] = frozenset()  # (stage, microbatch) with BI and BW
    ordered: tuple[int, ...] = ()  # devices that have an order
    run: tuple[Pass, ...] = ()  # one legal order of everything
    apart: bool = True  # an Order per device, else one for all
    overlaps: frozenset[int] = frozenset()  # positions that share a slot

    @property
    def model(self) -> Model:
        return chain(self.stages, self.skips, self.tied)

    @property
    def directives(self) -> list[Directive]:
        places = [Place(where(PP=s), [d]) for s, d in enumerate(self.device_of)]
        split = [Split("MB", self.microbatches)] if self.split else []
        return [*places, *split, *self.orders]

    @property
    def orders(self) -> list[Order]:
        if not self.ordered:
            return []
        if not self.apart:
            return [Order(self.slots(p for p in self.run if self.device_of[p[1]] in self.ordered))]
        return [
            Order(self.slots(p for p in self.run if self.device_of[p[1]] == device))
            for device in self.ordered
        ]

    def slots(self, passes: Iterable[Pass]) -> list[list[Filter]]:
        slots: list[list[Filter]] = []
        for k, one in enumerate(passes):
            if k in self.overlaps and slots:
                slots[-1].append(self.filter(one))
            else:
                slots.append([self.filter(one)])
        return slots

    def filter(self, one: Pass) -> Filter:
        phase, stage, microbatch = one
        return where(PP=stage, **({"MB": microbatch} if self.split else {}), PASS=phase)


def needs(program: Program) -> dict[Pass, list[Pass]]:
    """What each pass waits for; written down from the model, not taken from the DAG."""
    found: dict[Pass, list[Pass]] = {}
    flows = [(k, k + 1) for k in range(program.stages - 1)] + list(program.skips)
    for m in range(program.microbatches):
        back = ["BI" if (s, m) in program.halved else "B" for s in range(program.stages)]
        for s in range(program.stages):
            found["F", s, m] = [("F", a, m) for a, b in flows if b == s]
            found[back[s], s, m] = [("F", s, m), *((back[b], b, m) for a, b in flows if a == s)]
            if (s, m) in program.halved:
                found["BW", s, m] = [("BI", s, m)]
    return found


def random_run(program: Program, random: Random) -> tuple[Pass, ...]:
    """One order of all passes, chosen at each moment among what can run."""
    left = {one: set(before) for one, before in needs(program).items()}
    run: list[Pass] = []
    while left:
        ready = [one for one, before in left.items() if not before]
        one = random.choice(ready)
        del left[one]
        run.append(one)
        for before in left.values():
            before.discard(one)
    return tuple(run)


@st.composite
def programs(
    draw: st.DrawFn,
    min_devices: int = 1,
    all_ordered: bool = False,
    overlapping: bool = True,
    tied: bool | None = None,
) -> Program:
    stages = draw(st.integers(max(1, min_devices), 5))
    random = Random(draw(st.integers(0, 2**32)))
    device_of = tuple(
        s if s < min_devices else random.randrange(max(stages, min_devices)) for s in range(stages)
    )
    split = draw(st.sampled_from([True, True, True, False]))
    microbatches = draw(st.integers(1, 6)) if split else 1
    far = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    every = [(s, m) for s in range(stages) for m in range(microbatches)]
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    devices = sorted(set(device_of))
    blank = Program(
        stages=stages,
        device_of=device_of,
        microbatches=microbatches,
        skips=tuple(pair for pair in far if random.random() < 0.3),
        tied=random.random() < 0.4 if tied is None else tied,
        clip=draw(st.booleans()),
        split=split,
        halved=frozenset(pair for pair in every if random.random() < share),
        ordered=tuple(devices if all_ordered else chosen(devices, draw, random)),
        apart=draw(st.booleans()),
    )
    run = random_run(blank, random)
    share = random.choice([0.0, 0.2]) if overlapping else 0.0
    together = frozenset(k for k in range(len(run)) if random.random() < share)
    return replace(blank, run=run, overlaps=together)


def chosen(devices: list[int], draw: st.DrawFn, random: Random) -> list[int]:
    """All devices, none of them, or some."""
    share = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return [device for device in devices if random.random() < share]
