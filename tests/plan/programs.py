"""Random legal strategies on made-up models: any placement, any order that the dataflow allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st
from synthetic import chain, network

from piper.directives import Directive, Order, Place, Split
from piper.ir.filters import Filter, where
from piper.ir.model import Model

Pass = tuple[str, int, int]  # phase, stage, microbatch


@dataclass(frozen=True)
class Program:
    """A model and a strategy for it, with all that the test must know about them."""

    model: Model
    device_of: tuple[int, ...]  # by stage
    microbatches: int
    clip: bool = False
    split: bool = True  # without it there is one microbatch and no MB
    halved: frozenset[tuple[int, int]] = frozenset()  # (stage, microbatch) with BI and BW
    ordered: tuple[int, ...] = ()  # devices that have an order
    run: tuple[Pass, ...] = ()  # one legal order of everything
    apart: bool = True  # an Order per device, else one for all
    overlaps: frozenset[int] = frozenset()  # positions in an order that share a slot

    @property
    def directives(self) -> list[Directive]:
        places = [Place(where(PP=s), [d]) for s, d in enumerate(self.device_of)]
        split = [Split("MB", self.microbatches)] if self.split else []
        return [*places, *split, *self.orders]

    @property
    def orders(self) -> list[Order]:
        rows = [[device] for device in self.ordered] if self.apart else [list(self.ordered)]
        mine = [[one for one in self.run if self.device_of[one[1]] in row] for row in rows if row]
        return [Order(self.slots(passes)) for passes in mine]

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
    regions = program.model.regions
    maker = {value: k for k, region in enumerate(regions) for value in region.outputs}
    for m in range(program.microbatches):
        back = ["BI" if (s, m) in program.halved else "B" for s in range(len(regions))]
        for s, region in enumerate(regions):
            found["F", s, m] = [("F", maker[v], m) for v in region.inputs if v in maker]
            found["F", s, m] += [("F", s, m - 1)] if region.stateful and m else []
            if region.has_backward:
                found.setdefault((back[s], s, m), []).append(("F", s, m))
                for k in region.input_grads:
                    source = maker[region.inputs[k]]
                    found.setdefault((back[source], source, m), []).append((back[s], s, m))
                if back[s] == "BI":
                    found["BW", s, m] = [("BI", s, m)]
    return found


def random_run(program: Program, random: Random) -> tuple[Pass, ...]:
    """One order of all passes, chosen at each moment among what can run."""
    left = {one: set(before) for one, before in needs(program).items()}
    run: list[Pass] = []
    while left:
        one = random.choice([one for one, before in left.items() if not before])
        del left[one]
        run.append(one)
        for before in left.values():
            before.discard(one)
    return tuple(run)


def random_model(random: Random, stages: int) -> Model:
    """A chain, with or without skips and tied parameters; or any network."""
    if random.random() < 0.4:
        return network(random, stages)
    far = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    skips = tuple(pair for pair in far if random.random() < 0.3)
    return chain(stages, skips, tied=random.random() < 0.5)


def random_program(
    random: Random,
    stages: int,
    microbatches: int,
    min_devices: int = 1,
    all_ordered: bool = False,
    overlapping: bool = True,
    clip: bool | None = None,
) -> Program:
    """`min_devices`: at least so many are used. `all_ordered`: orders leave no choice anywhere."""
    device_of = [s if s < min_devices else random.randrange(stages) for s in range(stages)]
    random.shuffle(device_of)
    share = 1.0 if all_ordered else random.choice([0.0, 0.5, 1.0])
    blank = Program(
        model=random_model(random, stages),
        device_of=tuple(device_of),
        microbatches=microbatches,
        clip=random.random() < 0.5 if clip is None else clip,
        split=microbatches > 1 or random.random() < 0.5,
        ordered=tuple(device for device in sorted({*device_of}) if random.random() < share),
        apart=random.random() < 0.5,
    )
    blank = replace(blank, halved=random_halves(blank, random))
    share = random.choice([0.0, 0.2]) if overlapping else 0.0
    run = random_run(blank, random)
    overlaps = frozenset(k for k in range(len(run)) if random.random() < share)
    return replace(blank, run=run, overlaps=overlaps)


def random_halves(program: Program, random: Random) -> frozenset[tuple[int, int]]:
    """A backward is split by the order that names its halves: only where there is one."""
    share = random.choice([0.0, 0.3, 1.0])
    stages = [s for s, device in enumerate(program.device_of) if device in program.ordered]
    parts = [(s, m) for s in stages for m in range(program.microbatches)]
    return frozenset(part for part in parts if random.random() < share)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return random_program(Random(draw(st.integers(0, 2**32))), stages, microbatches)
