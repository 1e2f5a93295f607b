"""What `Remat` with `keep="auto"` recomputes: as little as fits in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from piper.costs import Costs
from piper.directives import Directive, Remat
from piper.directives.remat import LADDER
from piper.ir.dag import Dag
from piper.ir.filters import Filter, where
from piper.ir.model import Region
from piper.ir.nodes import Tags
from piper.ir.partition.knapsack import Option, best_options
from piper.ir.remat_policy import RematPolicy
from piper.job.compile.compiler import Compiled
from piper.names import BI, B, Device, F, Phase, RegionId
from piper.plan.instructions import Plan, Run

Compile = Callable[[Sequence[Directive]], Compiled]
Peaks = Callable[[Compiled], Mapping[Device, int]]
Choice = Mapping[Tags, int]  # positions in `OPTIONS`, for regions with these tags

OPTIONS: tuple[RematPolicy | None, ...] = (*LADDER, None)  # None keeps everything
ROUNDS = 4  # how often the choice is corrected by what it needs in truth


def fitted(kept: Compiled, compile: Compile, peaks: Peaks, limit: int, costs: Costs) -> Compiled:
    """The fastest choice found for the automatic `Remat` of a program that fits.

    `kept` has everything kept, as an automatic `Remat` that nobody has chosen for has. If no choice
    fits, everything they match is recomputed. `costs` say what is fast.

    First everything is recomputed, which gives the least peak of each device. What a region keeps
    in addition adds at most its bytes times the microbatches that are alive at once. Within this
    bound, the choice is a knapsack problem for each device. Then the choice is compiled, and the
    room of each device is corrected by what is left or missing.
    """
    fixed = [one for one in kept.program if not (isinstance(one, Remat) and one.is_auto)]
    if max(peaks(kept).values()) <= limit:
        return replace(kept, program=tuple(fixed))
    # bytes are counted operator by operator: repeating one that only moves bytes takes time, too
    units = Units(kept, replace(costs, ahead=True))
    choice: Choice = dict.fromkeys(units.regions, 0)
    best = compile([*fixed, *units.directives(choice)])
    least, found = units.seconds(choice), peaks(best)
    room = {device: limit - peak for device, peak in found.items()}
    if min(room.values()) < 0:
        return best
    enough = room  # the most room for which the choice was seen to fit
    for _ in range(ROUNDS):
        before, choice = choice, units.choose(room)
        if choice == before:
            break
        made = compile([*fixed, *units.directives(choice)])
        slack = {device: limit - peak for device, peak in peaks(made).items()}
        if min(slack.values()) < 0:
            room = {device: (room[device] + enough[device]) // 2 for device in room}
            continue
        if units.seconds(choice) < least:
            best, least = made, units.seconds(choice)
        enough, room = room, {device: room[device] + slack[device] for device in room}
    return best


@dataclass
class Units:
    """Regions under an automatic `Remat`. Those with the same tags are chosen together."""

    kept: Compiled  # with everything kept
    costs: Costs

    def __post_init__(self) -> None:
        regions: dict[Tags, list[Region]] = {}
        for region in self.kept.dag.model.regions:
            if region.recomputes and region.recomputes.auto:
                regions.setdefault(region.tags, []).append(region)
        self.regions: Mapping[Tags, Sequence[Region]] = regions
        self.phases = phases_of(self.kept.dag)
        self.live = {plan.device: most_alive(plan) for plan in self.kept.plans}

    def choose(self, room: Mapping[Device, int]) -> Choice:
        """The best choice of each device. A unit on several devices gets the least of theirs."""
        found: dict[Tags, int] = {}
        for device, live in self.live.items():
            mine = [tags for tags, some in self.regions.items() if any(live[r.id] for r in some)]
            groups = [self.options(tags, live) for tags in mine]
            least = sum(group[0][0] for group in groups)
            chosen = best_options(groups, least + room[device]) or [0] * len(mine)
            for tags, position in zip(mine, chosen, strict=True):
                either = (position, found.get(tags, position))
                found[tags] = min(either, key=partial(self.bytes, tags))
        return found

    def bytes(self, tags: Tags, option: int) -> int:
        return sum(saved_bytes(region, option) for region in self.regions[tags])

    def options(self, tags: Tags, live: Mapping[RegionId, int]) -> list[Option]:
        """Bytes on a device, and seconds that are not spent, of each option."""
        return [
            (
                sum(live[region.id] * saved_bytes(region, k) for region in self.regions[tags]),
                -sum(self.backward(region, k) for region in self.regions[tags]),
            )
            for k in range(len(OPTIONS))
        ]

    def seconds(self, choice: Choice) -> float:
        """Of the backwards of one microbatch."""
        every = ((region, k) for tags, k in choice.items() for region in self.regions[tags])
        return sum(self.backward(region, k) for region, k in every)

    def backward(self, region: Region, option: int) -> float:
        model, found = self.kept.dag.model, variant(region, option)
        return sum(self.costs.region(model, found, phase) for phase in self.phases[region.id])

    def directives(self, choice: Choice) -> Iterator[Remat]:
        """A directive for each unit that recomputes."""
        names = dict.fromkeys(name for tags in self.all_tags for name, _ in tags)
        for tags, option in choice.items():
            policy = OPTIONS[option]
            if policy is not None:
                yield Remat(exactly(tags, names), policy)

    @property
    def all_tags(self) -> Iterator[Tags]:
        return (region.tags for region in self.kept.dag.model.regions)


def variant(region: Region, option: int) -> Region:
    policy = OPTIONS[option]
    return region if policy is None else region.recomputed[policy]


def saved_bytes(region: Region, option: int) -> int:
    return sum(spec.nbytes for spec in variant(region, option).saved)


def exactly(tags: Tags, names: Iterable[str]) -> Filter:
    """The regions with these tags and no others."""
    return where(**{name: dict(tags).get(name) for name in names})


def phases_of(dag: Dag) -> dict[RegionId, set[Phase]]:
    """The passes of each region's backward."""
    found: dict[RegionId, set[Phase]] = {}
    for node in dag.computes:
        if node.phase is not F:
            found.setdefault(node.region, set()).add(node.phase)
    return found


def most_alive(plan: Plan) -> Counter[RegionId]:
    """For how many microbatches at once a device keeps activations of each region."""
    now, most = Counter[RegionId](), Counter[RegionId]()
    for region, phase in passes(plan):
        now[region] += 1 if phase is F else -1 if phase in (B, BI) else 0
        most[region] = max(most[region], now[region])
    return most


def passes(plan: Plan) -> Iterator[tuple[RegionId, Phase]]:
    """In the order in which a device runs them."""
    runs = (one for one in plan.instructions if isinstance(one, Run))
    return ((RegionId(run.region), Phase(run.phase)) for run in runs)
