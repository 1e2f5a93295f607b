"""Options that an optimizer's function gives by position, number or identity.

The function is called once for each bucket, with parameters of Piper. It must give every parameter
what it gives in a plain loop, where it gets all of the model's own parameters at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from piper.errors import StrategyError, is_out_of_memory
from piper.runtime.optimizers.kept_optimizers import own_tensors
from piper.runtime.optimizers.known_optimizers import (
    MakeOptimizer,
    MakeScheduler,
    Named,
    is_torchs,
)
from piper.runtime.optimizers.own_parameters import WithAttributes, lent, stand_in, with_attributes
from piper.runtime.optimizers.parameter_groups import WithoutDecay
from piper.runtime.optimizers.user_optimizer import chose_none, forward

STEPS = 6  # of schedulers that are compared
NOT_GIVEN = ""  # the name of parameters that the function was not given
Options = dict[str, Any]  # of a group, without its parameters


def refuse_options_by_position(
    make: MakeOptimizer,
    schedule: MakeScheduler | None,
    parameters: Mapping[str, torch.Tensor],
    buckets: Sequence[Sequence[str]],
) -> None:
    """Compare what parameters get in a call with all of them, and in one for each bucket."""
    if is_plain(make) and (schedule is None or len(buckets) < 2):
        return
    make = with_attributes(make, parameters)
    try:
        with lent(parameters) as own:
            whole = options_over_time(make, schedule, own)
    except Exception:  # the calls that count fail as well, or need more than shapes
        return
    for names in buckets:
        found = options_of_bucket(make, schedule, named_like(parameters, names))
        if found is None:
            continue
        for step, (now, wanted) in enumerate(zip(found, whole, strict=True)):
            for name in names:
                if not same(now.get(name), wanted.get(name)):
                    given = now.get(name), wanted.get(name)
                    if NOT_GIVEN in now:
                        raise of_its_own(name)
                    if is_by_identity(make, parameters, whole[0]):
                        raise by_identity(name, *given)
                    raise different(name, *given, step)


def is_by_identity(
    make: MakeOptimizer, parameters: Mapping[str, torch.Tensor], own: dict[str, Options]
) -> bool:
    """Whether parameters that only look the same get other options, also all at once."""
    try:
        found = options_over_time(make, None, named_like(parameters, parameters))[0]
    except Exception:  # say, because it chooses none of them
        return True
    return not all(same(found.get(name), own.get(name)) for name in parameters)


def is_plain(make: Any) -> bool:
    """Whether it is one of torch's optimizers, with the same options for all parameters."""
    inner = make.make if isinstance(make, WithAttributes) else make
    inner = inner.make if isinstance(inner, WithoutDecay) else inner
    kind = inner.func if isinstance(inner, partial) else inner
    return isinstance(kind, type) and is_torchs(kind)


def named_like(parameters: Mapping[str, torch.Tensor], names: Iterable[str]) -> Named:
    """Parameters like these, in the order of the model, that need no memory."""
    chosen = set(names)
    return [(name, stand_in(one)) for name, one in parameters.items() if name in chosen]


def options_of_bucket(
    make: MakeOptimizer, schedule: MakeScheduler | None, named: Named
) -> list[dict[str, Options]] | None:
    """None if there is no memory for it: the call that counts says so, with what is kept."""
    try:
        return options_over_time(make, schedule, named)
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise chose_none(error, named) or refused(
            f"it works with all parameters at once, but not with {named[0][0]} and others of its "
            f"bucket: {error}"
        ) from error


def options_over_time(
    make: MakeOptimizer, schedule: MakeScheduler | None, named: Named
) -> list[dict[str, Options]]:
    """What each parameter has at first, and after each of a few steps."""
    with torch.enable_grad():
        optimizer = make(list(named))
    own_tensors(optimizer)
    found = [options_by_name(optimizer, named)]
    if schedule is not None:
        scheduler = schedule(optimizer)
        for _, parameter in named:
            optimizer.state[parameter].update()  # there is one after a step, and it may be counted
        for _ in range(STEPS):
            found.append(options_by_name(optimizer, named))
            forward(scheduler, 1)
    return found


def options_by_name(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, Options]:
    names = {id(parameter): name for name, parameter in named}
    return {
        names.get(id(parameter), NOT_GIVEN): options_of(group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def options_of(group: Mapping[str, Any]) -> Options:
    """
    >>> options_of({"params": [], "lr": torch.tensor(0.5), "betas": (0.9, 0.99)})
    {'lr': 0.5, 'betas': (0.9, 0.99)}
    """
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def same(one: Options | None, other: Options | None) -> bool:
    if one is None or other is None:
        return one is other
    return not any(differing(one, other))


def differing(one: Options, other: Options) -> Iterator[str]:
    """The options that differ. Functions and objects are made anew in each call."""
    plain = (bool, int, float, complex, str, tuple, list, type(None))
    for key in {**one, **other}:
        a, b = one.get(key), other.get(key)
        if isinstance(a, plain) and isinstance(b, plain) and a != b:
            yield key


def different(name: str, now: Options | None, whole: Options | None, step: int) -> StrategyError:
    if now is None or whole is None:
        trained = "trains it only" if whole is None else "leaves it out"
        return refused(f"it {trained} if it gets {name} with the parameters of its bucket")
    key = next(differing(now, whole))
    return refused(
        f"it gives {name} {key}={whole.get(key)} among all parameters, and {key}={now.get(key)} "
        f"among those of its bucket" + (f" after {step - 1} steps" if step > 1 else ""),
        "lr_scheduler" if step else "optimizer",
    )


def of_its_own(name: str) -> StrategyError:
    return StrategyError.of(
        "optimizer",
        f"it was given {name} and others, and trains parameters that it was not given, such as "
        "those of model.parameters()",
        "write a function of the (name, parameter) pairs that it is given: lambda named: "
        "torch.optim.SGD([p for _, p in named], lr=0.1)",
    )


def by_identity(name: str, now: Options | None, whole: Options | None) -> StrategyError:
    return StrategyError.of(
        "optimizer",
        f"{name} has {both(now, whole)}: the function is given parameters of Piper, which have the "
        "names, values and attributes of the model's own, but are others",
        "compare names instead of id(p), `p is model.x`, `p in set(model.head.parameters())` or "
        "classes: name.startswith('head.'); or set an attribute on the model's parameters before, "
        "such as p.no_decay = True: Piper's have it, too",
    )


def both(now: Options | None, whole: Options | None) -> str:
    """What a parameter gets if it is the model's own, and if it only looks the same."""
    if now is None or whole is None:
        return "an optimizer only if it is, or is not, the model's own"
    key = next(differing(now, whole))
    own, other = whole.get(key), now.get(key)
    return f"{key}={own} if it is the model's own, and {key}={other} if it only looks the same"


def refused(what: str, argument: str = "optimizer") -> StrategyError:
    return StrategyError.of(
        argument,
        f"{what}: it is called once for each bucket of parameters",
        "choose options by the name and shape of a parameter, not by its position or by how many "
        "there are; or compute these before, from model.named_parameters()",
    )
