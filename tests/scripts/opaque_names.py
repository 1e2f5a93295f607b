"""Compile, check, price and draw strategies; with `opaque`, under names that mean nothing.

Prints what came out but for names. `tests/test_names.py` compares both: a place that takes a name
apart would find nothing in it, and do something else.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain as chain_of
from random import Random
from typing import Any

from piper.ir import naming


def numbered(names: dict[Any, str], make: Callable[..., str]) -> Callable[..., str]:
    """The same name for the same arguments, and nothing in it that says which."""

    def name(*given: Any, **more: Any) -> str:
        key = (make.__name__, inspect.signature(make).bind(*given, **more).args)
        same = make(*given, **more)
        if same in given:  # a name that stays what it was
            return same
        return names.setdefault(key, f"n{len(names):06d}")

    return name


def hide_names() -> None:
    """In the module itself, and where the import of `piper` has taken its functions by name."""
    names: dict[Any, str] = {}
    makers = [make for make in vars(naming).values() if inspect.isfunction(make)]
    own = [make for make in makers if make.__module__ == naming.__name__]
    hidden = {make: numbered(names, make) for make in own if make.__name__ != "part"}
    for module in [one for name, one in sys.modules.items() if name.startswith("piper.")]:
        for name, found in list(vars(module).items()):
            if inspect.isfunction(found) and found in hidden:
                setattr(module, name, hidden[found])


if __name__ == "__main__" and "opaque" in sys.argv:
    hide_names()

from draws import SOAK, draws  # noqa: E402
from plan.expert_programs import random_experts  # noqa: E402
from plan.programs import random_program  # noqa: E402
from synthetic import chain, moe_chain  # noqa: E402

from piper import strategies  # noqa: E402
from piper.ir.by_device.schedule_rows import dag_rows  # noqa: E402
from piper.ir.model import Model  # noqa: E402
from piper.job.compile.compiler import Compiled, compile_strategy  # noqa: E402
from piper.job.compile.pricing import predict, price  # noqa: E402
from piper.names import BucketId, RegionId, ValueId  # noqa: E402
from piper.plan.analyse.memory import peak, timeline  # noqa: E402
from piper.plan.analyse.traffic import traffic  # noqa: E402
from piper.view.schedule_grid import grid  # noqa: E402
from piper.view.view_data import view_data  # noqa: E402

PROGRAMS = draws(8, 120)
LEVELS = (0, 2, 3)


def compiled() -> Iterator[Compiled]:
    for number, (name, build) in enumerate(strategies.BUILDERS.items()):
        stages = 4 if name in ("interleaved-1f1b", "interleaved-zb", "zbv", "dualpipev") else 2
        for zero in LEVELS if SOAK else [LEVELS[number % len(LEVELS)]]:
            options = {"pp": 2, "dp": 2, "zero": zero, "microbatches": 4}
            model = hidden(chain(stages, tied=True))
            yield compile_strategy(model, build(**options), clip=zero == 2)
        yield compile_strategy(hidden(moe_chain(stages)), build(**options, ep=2))
    for seed in range(PROGRAMS):
        random = Random(seed)
        size, experts = (random.randint(1, 4), random.randint(1, 4)), seed % 2 == 1
        program = random_experts(random, *size, 2) if experts else random_program(random, *size)
        yield compile_strategy(hidden(program.model), program.directives, clip=program.clip)


def hidden(model: Model) -> Model:
    """The same model, its regions, buckets and values called by numbers."""
    if "opaque" not in sys.argv:
        return model
    kinds = ([r.id for r in model.regions], model.buckets, model.values)
    tokens = {name: f"m{k:04d}" for k, name in enumerate(chain_of(*kinds))}

    def all_of(names: Iterable[str]) -> tuple[Any, ...]:
        return tuple(tokens[name] for name in names)

    return Model(
        regions=tuple(
            replace(
                one,
                id=RegionId(tokens[one.id]),
                inputs=all_of(one.inputs),
                outputs=all_of(one.outputs),
                buckets=all_of(one.buckets),
            )  # fmt: skip
            for one in model.regions
        ),
        values={ValueId(tokens[name]): value for name, value in model.values.items()},
        buckets={
            BucketId(tokens[name]): replace(bucket, id=BucketId(tokens[name]))
            for name, bucket in model.buckets.items()
        },
        loss=ValueId(tokens[model.loss]),
    )


def without_names(one: Compiled) -> Iterator[Any]:
    shown = view_data("it", one.dag, one.plans)
    yield [(k["kind"], k["microbatch"], k["stage"]) for k in [shown.nodes]]
    yield grid(dag_rows(one.dag))
    found = price(one)
    yield round(found.seconds, 12), predict(one, found).size
    for plan in one.plans:
        yield [(i.kind, i.stream, i.waits, len(i.uses), len(i.ends)) for i in plan.instructions]
        worst = peak(one.dag, plan)
        yield worst.total, worst.at, sorted(worst.held.items()), len(timeline(one.dag, plan))
        yield sorted(traffic(plan).items())


if __name__ == "__main__":
    for number, made in enumerate(compiled()):
        for row in without_names(made):
            print(number, row)
