"""What a training loop or a scheduler has changed of an optimizer, which plans would not see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piper.errors import InputError, PiperError, StrategyError
from piper.runtime.torch_private import (
    has_gradient_hooks,
    has_own_step,
    has_step_hooks,
    writes_of,
)

Options = tuple[tuple[str, Any], ...]  # of one group of parameters
PLAIN = (int, float, str, bool, type(None))
OF_TORCH = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))


@dataclass(frozen=True, slots=True)
class Who:
    """Who changes an optimizer: for messages."""

    argument: str
    text: str
    kind: type[InputError] | type[StrategyError]

    def error(self, what: str, fix: str) -> PiperError:
        return self.kind.of(self.argument, f"{self.text} {what}", fix)


@dataclass(frozen=True, slots=True)
class Seen:
    """What somebody can change of an optimizer. Nothing waits for a device."""

    optimizer: torch.optim.Optimizer
    options: tuple[Options, ...]  # of its groups
    parameters: tuple[int, ...]
    trained: tuple[bool, ...]
    writes: tuple[tuple[int, int], ...]  # how many, and where they are
    step: tuple[Any, ...]
    state: tuple[int, int]  # entries, and writes to their tensors


def seen(optimizer: torch.optim.Optimizer) -> Seen:
    parameters = weights_of(optimizer)
    step = type(optimizer), has_own_step(optimizer), has_step_hooks(optimizer)
    kept = [value for held in optimizer.state.values() for value in held.values()]
    return Seen(
        optimizer,
        tuple(options_of(optimizer)),
        tuple(map(id, parameters)),
        tuple(p.requires_grad for p in parameters),
        tuple((writes_of(p), p.data_ptr()) for p in parameters),
        (*step, any(map(has_gradient_hooks, parameters))),
        (len(kept), sum(writes_of(one) for one in kept if isinstance(one, torch.Tensor))),
    )


def weights_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def options_of(optimizer: torch.optim.Optimizer) -> Iterator[Options]:
    """Of each group, with attributes of its own that are numbers or texts."""
    own = [(f"self.{k}", v) for k, v in vars(optimizer).items() if k not in OF_TORCH]
    for group in optimizer.param_groups:
        yield tuple((k, comparable(v)) for k, v in (*group.items(), *own) if is_simple(v))


def is_simple(value: Any) -> bool:
    """Whether it can be compared without reading a tensor, such as betas."""
    inside = isinstance(value, tuple) and all(map(is_simple, value))
    return isinstance(value, (*PLAIN, torch.Tensor)) or inside


def comparable(value: Any) -> Any:
    """For a tensor: how often it was written."""
    return ("a tensor", writes_of(value)) if isinstance(value, torch.Tensor) else value


def refuse_changed(old: Seen, new: Seen, who: Who) -> None:
    """What is wrong even if it is done to all optimizers."""
    if new.parameters != old.parameters:
        raise who.error(
            "has put other parameters into groups of an optimizer",
            "choose parameters where the optimizer is made; freeze the others on the model before",
        )
    if new.trained != old.trained:
        raise who.error(
            f"has set requires_grad of {name_of(old, old.trained, new.trained)} in an optimizer, "
            "and a captured backward still gives it a gradient",
            "load trainer.state_dict() into the model, call requires_grad_(False) on its "
            "parameter, and make a new Trainer with it",
        )
    if new.writes != old.writes:
        raise who.error(
            f"has written to {name_of(old, old.writes, new.writes)}, which it got from an "
            "optimizer: plans may hold copies of it, or a part",
            "change weights in the optimizer's step",
        )
    if new.step != old.step:
        raise who.error(
            "has put a hook on an optimizer or its parameters, or replaced its step",
            "write a class of your own, derived from the optimizer's, with that step",
        )


def refuse_partly_reset(before: Sequence[Seen], now: Sequence[Seen], who: Who) -> None:
    changed = [new.state != old.state for old, new in zip(before, now, strict=True) if old.state[0]]
    if any(changed) and not all(changed):
        raise who.error(
            "has changed the state of some optimizers only: every bucket of parameters has its own",
            "keep all optimizers that your function returns, and change each of them",
        )


def refuse_partly_changed(
    before: Sequence[tuple[Options, ...]], now: Sequence[tuple[Options, ...]], who: Who
) -> None:
    """Groups with equal options must still have equal ones. A scheduler knows their positions."""
    found: dict[tuple[Any, ...], Options] = {}
    for old, new in zip(before, now, strict=True):
        for place, (one, other) in enumerate(zip(old, new, strict=False)):
            known = found.setdefault((len(old), place, one), other)
            if known != other:
                raise only_some(one, other if other != one else known, who)


def only_some(old: Options, new: Options, who: Who) -> PiperError:
    key, value = next(one for one in new if one not in old)
    text = key if isinstance(value, tuple) and value[:1] == ("a tensor",) else f"{key}={value}"
    return who.error(
        f"has set {text} in some optimizers only: every bucket of parameters has its own, and some "
        "are made for a trial",
        "give lr_scheduler=..., or keep all optimizers that your function returns, and change each "
        "of them",
    )


def name_of(one: Seen, old: Sequence[Any], new: Sequence[Any]) -> str:
    """Of the first parameter for which these differ."""
    names = [name for group in one.optimizer.param_groups for name in group.get("param_names", ())]
    place = next(k for k, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    return names[place] if len(names) == len(one.parameters) else "a parameter"
