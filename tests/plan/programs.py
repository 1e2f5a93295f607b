"""Random legal strategies on made-up models: any placement, any order that the dataflow allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from hypothesis import strategies as st
from synthetic import chain, network, with_odd_parameters, without_buffers

from piper.directives import Directive, Offload, Order, Place, Replicate, Shard, Split
from piper.directives.order import Ahead
from piper.ir.filters import Filter, where
from piper.ir.model import Model

Pass = tuple[str, int, int]  # phase, stage, microbatch
COPIES = (1, 1, 2, 2, 3, 4)
STREAMS = ("dp", "pp", "side")


@dataclass(frozen=True)
class Program:
    """A model and a strategy for it, with all that the test must know about them."""

    model: Model
    device_of: tuple[int, ...]  # by stage: where its first replica is
    microbatches: int
    copies: int = 1  # replicas of everything
    mirrored: bool = False  # every second replica goes through the devices the other way round
    replicates: tuple[tuple[int, Replicate], ...] = ()  # with their places among the directives
    shards: tuple[tuple[int, Shard], ...] = ()
    offloads: tuple[tuple[int, Offload], ...] = ()
    clip: bool = False
    split: bool = True  # without it there is one microbatch and no MB
    halved: frozenset[tuple[int, int]] = frozenset()  # (stage, microbatch) with BI and BW
    ordered: tuple[int, ...] = ()  # devices that have an order
    run: tuple[Pass, ...] = ()  # one legal order of everything
    apart: bool = True  # an Order per device, else one for all
    overlaps: frozenset[int] = frozenset()  # positions in an order that share a slot
    ahead: Ahead = False  # whether neighbouring slots may overlap

    @property
    def directives(self) -> list[Directive]:
        places = [Place(where(PP=s), self.devices(s)) for s in range(len(self.device_of))]
        split = [Split("MB", self.microbatches)] if self.split else []
        found: list[Directive] = [*places, *split, *self.orders]
        for at, one in (*self.replicates, *self.shards, *self.offloads):
            found.insert(at, one)
        return found

    @property
    def width(self) -> int:
        """Devices that one replica may use; an even number has a mirror image."""
        used = max(self.device_of) + 1
        return used + used % 2 if self.mirrored else used

    def devices(self, stage: int) -> list[int]:
        return [self.device(stage, replica) for replica in range(self.copies)]

    def device(self, stage: int, replica: int) -> int:
        first = self.device_of[stage]
        if not self.mirrored:
            return first + replica * self.width
        there = self.width - 1 - first if replica % 2 else first
        return there + replica // 2 * self.width

    @property
    def shared(self) -> bool:
        """Whether two replicas meet on a device, and so are fed one batch together."""
        return self.mirrored and any(self.width - 1 - d in self.device_of for d in self.device_of)

    @property
    def feeds(self) -> int:
        return self.copies // 2 if self.shared else self.copies

    @property
    def parts(self) -> int:
        """Microbatches of each feed's batch."""
        return self.microbatches * self.copies // self.feeds

    @property
    def feed_of(self) -> dict[int, int]:
        """By device."""
        together = self.copies // self.feeds
        stages, replicas = range(len(self.device_of)), range(self.copies)
        return {self.device(s, r): r // together for s in stages for r in replicas}

    @property
    def orders(self) -> list[Order]:
        lanes = dict.fromkeys(map(self.lane, self.ordered))
        rows = [[lane] for lane in lanes] if self.apart else [list(lanes)]
        mine = [[one for one in self.run if self.is_ordered(one, row)] for row in rows if row]
        return [Order(self.slots(passes), ahead=self.ahead) for passes in mine]

    def lane(self, device: int) -> int:
        """Devices that run one common list have one number."""
        return min(device, self.width - 1 - device) if self.mirrored else device

    def is_ordered(self, one: Pass, lanes: list[int]) -> bool:
        device = self.device_of[one[1]]
        return device in self.ordered and self.lane(device) in lanes

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
    """What each pass of a stage waits for; written down from the model, not taken from the DAG."""
    found: dict[Pass, list[Pass]] = {}
    regions = program.model.regions
    stage = {region.id: dict(region.tags)["PP"] for region in regions}
    maker = {value: stage[region.id] for region in regions for value in region.outputs}
    for m in range(program.microbatches):
        back = ["BI" if (s, m) in program.halved else "B" for s in range(len(program.device_of))]
        for region in regions:
            s = stage[region.id]
            first = found.setdefault(("F", s, m), [])
            first += [("F", maker[v], m) for v in region.inputs if maker.get(v, s) != s]
            first += [("F", s, m - 1)] if region.stateful and m else []
            if region.has_backward:
                found.setdefault((back[s], s, m), []).append(("F", s, m))
                for source in (maker[region.inputs[k]] for k in region.input_grads):
                    if source != s:
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
    copies: int | None = None,
) -> Program:
    """`min_devices`: at least so many are used. `all_ordered`: orders leave no choice anywhere."""
    most = max(min_devices, random.choice([1, 2, stages, stages]))
    device_of = [s if s < min_devices else random.randrange(most) for s in range(stages)]
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
    blank = with_copies(blank, random, random.choice(COPIES) if copies is None else copies)
    blank = replace(blank, halved=random_halves(blank, random))
    share = random.choice([0.0, 0.2]) if overlapping else 0.0
    run = random_run(blank, random)
    overlaps = frozenset(k for k in range(len(run)) if random.random() < share)
    done = replace(blank, run=run, overlaps=overlaps)
    return replace(done, replicates=random_replicates(done, random))


def with_copies(program: Program, random: Random, copies: int) -> Program:
    if copies == 1:
        return program
    model = without_buffers(program.model)
    if random.random() < 0.7:
        model = with_odd_parameters(model, random)
    mirrored = copies % 2 == 0 and random.random() < 0.4
    return replace(program, model=model, copies=copies, mirrored=mirrored)


def random_replicates(program: Program, random: Random) -> tuple[tuple[int, Replicate], ...]:
    """One for each stage, or one for all; anywhere among the other directives.

    Stages often share their settings, and then the buffers for gathered parameters.
    """
    if program.copies == 1 and random.random() < 0.8:
        return ()  # needs none, but may have some
    alike = len({*program.device_of}) == 1 and random.random() < 0.3
    filters = [where()] if alike else [where(PP=s) for s in range(len(program.device_of))]
    known = [random_settings(random) for _ in range(random.choice([1, 1, 2, len(filters)]))]
    mixed = random.sample(range(program.copies), program.copies)
    grouped = program.copies == 4 and random.random() < 0.6
    last = len(program.directives)
    found = []
    for s, wanted in enumerate(filters):
        devices = [program.device(s, replica) for replica in mixed]
        groups = [devices[:2], devices[2:]] if grouped else devices
        found.append((random.randint(0, last), Replicate(wanted, groups, **random.choice(known))))
    return tuple(found)


WAITING = (
    ["activations"], ["optimizer"], ["activations", "optimizer"], ["parameters"],
    ["parameters", "optimizer"], ["activations", "optimizer", "parameters"],
)  # fmt: skip


def with_offloads(program: Program, random: Random) -> Program:
    """Some of the stages, each with settings of its own, or all of them together."""
    stages, last = range(len(program.device_of)), len(program.directives)
    some = [s for s in stages if random.random() < 0.7]
    filters = [where()] if random.random() < 0.3 else [where(PP=s) for s in some]
    found = tuple(
        (random.randint(0, last), Offload(
            wanted, what, stream=random.choice(("offload", *STREAMS)), ahead=random.randrange(3),
            buffers=random.choice([1, 1, 2, 3]),
        ))
        for wanted in filters
        for what in random.choice(WAITING)
    )  # fmt: skip
    return replace(program, offloads=found)


def random_settings(random: Random) -> dict[str, Any]:
    """Messages from one for each parameter to one for all; three streams, one of them busy."""
    zero = random.choice([0, 1, 2, 3, 3])
    return {
        "zero": zero,
        "reduce": random.choice([None, "once"]) if zero == 3 else None,
        "bucket_mb": random.choice([1, 30, 64, 2**20]) / 2**20,
        "reduce_stream": random.choice(STREAMS),
        "gather_stream": random.choice(STREAMS),
        "gather_ahead": random.randrange(4),
        "gather_buffers": random.choice([1, 1, 2, 3, None]),
    }


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
