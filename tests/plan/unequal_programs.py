"""Random strategies: stages on different numbers of devices, several replicas on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random

from plan.mutants import Programs
from plan.programs import Program, random_program, random_run, random_settings
from synthetic import with_odd_parameters, without_buffers

from piper.directives import Replicate
from piper.ir.filters import where
from piper.ir.placement.replicas import Replicas, replicas
from piper.job.compile.compiler import compile_strategy


@dataclass(frozen=True)
class Unequal(Program):
    """A program that says the devices of each stage."""

    lists: tuple[tuple[int, ...], ...] = ()

    def devices(self, stage: int) -> list[int]:
        return list(self.lists[stage])

    @property
    def replicas(self) -> Replicas:
        return replicas(self.lists)

    @property
    def feeds(self) -> int:
        return len(self.replicas.feeds)

    @property
    def parts(self) -> int:
        return self.microbatches * len(self.replicas.feeds[0])

    @property
    def feed_of(self) -> dict[int, int]:
        return {device: self.replicas.feed(device) for row in self.lists for device in row}


def random_lists(random: Random, stages: int) -> list[tuple[int, ...]]:
    """One to three kinds of lists, some of which have devices in common."""
    kinds: list[list[int]] = []
    for _ in range(random.randint(1, 3)):
        used = {device for row in kinds for device in row}
        first = max(used, default=-1) + 1
        new = list(range(first, first + random.randint(1, 3)))
        pool = [*used, *new[:2]] if random.random() < 0.4 else new
        kinds.append([random.choice(pool) for _ in range(random.choice([1, 2, 2, 3, 4]))])
    rows = [random.choice(kinds) for _ in range(stages)]
    number = {d: k for k, d in enumerate(sorted({device for row in rows for device in row}))}
    return [tuple(number[device] for device in row) for row in rows]


def random_unequal(random: Random, all_ordered: bool = False) -> Unequal:
    """One order for all devices, or none."""
    stages, parts = random.randint(1, 4), random.randint(1, 3)
    lists = random_lists(random, stages)
    made = random_program(random, stages, parts, copies=1, overlapping=False)
    model = without_buffers(made.model)
    if random.random() < 0.7:
        model = with_odd_parameters(model, random)
    ordered = tuple(sorted({*made.device_of})) if all_ordered or random.random() < 0.5 else ()
    blank = Unequal(
        model=model, device_of=made.device_of, microbatches=parts, clip=made.clip,
        split=made.split, halved=made.halved if ordered else frozenset(), ordered=ordered,
        apart=False, lists=tuple(lists),
    )  # fmt: skip
    keep = [
        (0, Replicate(where(PP=s), tuple(dict.fromkeys(row)), **random_settings(random)))
        for s, row in enumerate(lists)
    ]
    return replace(blank, run=random_run(blank, random), replicates=tuple(keep))


@cache
def unequal() -> Programs:
    """Compiled programs in which some device has several replicas, or keeps a value for itself."""
    programs = (random_unequal(Random(seed), all_ordered=True) for seed in range(60))
    made = [(p, compile_strategy(p.model, p.directives, clip=p.clip)) for p in programs]
    return tuple((program, found) for program, found in made if found.dag.shares_devices)
