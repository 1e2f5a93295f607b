"""Updates that follow each other in a plan, in one call of torch.optim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from piper.plan.instructions import Free, Update
from piper.runtime.execute import Act, Program
from piper.runtime.state.offloaded_parameters import updating
from piper.runtime.torch_private import bare_optimizer, note_step
from piper.runtime.updates import BucketUpdate

Acts = list[tuple[int, Act]]
OF_PARAMETERS = ("params", "param_names")  # all else in a group are settings


@dataclass(slots=True)
class JoinedUpdates:
    """Updates that nothing comes between: one call of torch.optim, with the same results."""

    updates: Sequence[BucketUpdate]
    stepper: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        first = self.updates[0].bucket.optimizer
        assert first is not None
        self.stepper = bare_optimizer(first)

    def __call__(self) -> None:
        grads = [one.gradients() for one in self.updates]
        with ExitStack() as stack:
            here = [
                (one.bucket, g) for one, g in zip(self.updates, grads, strict=True) if g is not None
            ]
            for bucket, own in here:
                stack.enter_context(updating(bucket, own, None))
            buckets = [bucket for bucket, _ in here]
            if buckets and self.updates[0].is_allowed:
                self.step([bucket.optimizer for bucket in buckets if bucket.optimizer])
                for bucket in buckets:
                    bucket.round_masters()
            for bucket in buckets:
                self.updates[0].program.watch(bucket)

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Groups with equal settings are one. Each optimizer keeps the state of its parameters."""
        self.stepper.param_groups = list(joined_groups(optimizers))
        self.stepper.state = OwnStates(optimizers)
        self.stepper.step()
        for one in optimizers:
            note_step(one)


class OwnStates:
    """The state of each parameter, in the optimizer that it belongs to."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.owners = {
            parameter: one.state
            for one in optimizers
            for group in one.param_groups
            for parameter in group["params"]
        }

    def __getitem__(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        return self.owners[parameter][parameter]


def joined_groups(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in (group for one in optimizers for group in one.param_groups):
        key = tuple([setting(*one) for one in group.items() if one[0] not in OF_PARAMETERS])
        known = found.setdefault(key, {**group, "params": []})
        known["params"] += group["params"]
    yield from found.values()


def setting(name: str, value: Any) -> tuple[str, Any]:
    return name, value if value.__hash__ else repr(value)


def with_joined_updates(program: Program, acts: Acts) -> Acts:
    """Updates that follow each other, with nothing but what they free in between, as one.

    One that waits for a message begins anew: those before it do not wait for it.
    """
    code, found, run = program.plan.instructions, Acts(), Acts()
    for position, act in acts:
        one = code[position]
        if not isinstance(one, Update | Free) or program.messages(one):
            found += joined(program, run)
            run = []
        if isinstance(one, Update | Free):
            run.append((position, act))
        else:
            found.append((position, act))
    return found + joined(program, run)


def joined(program: Program, run: Acts) -> Acts:
    """These updates and frees, with one function for all updates that can be joined."""
    code = program.plan.instructions
    updates = [(k, one) for k, _ in run if isinstance(one := code[k], Update)]
    made = [program.bucket_update(k, one) for k, one in updates]
    kinds = {type(one.bucket.optimizer) for one in made}
    if len(made) < 2 or len(kinds) > 1 or not all(one.can_join for one in made):
        return run
    first, step = updates[0], JoinedUpdates(made)
    waits = program.messages(first[1])

    def act() -> None:
        for w in waits:
            program.wait_one(w)
        step()

    return [(first[0], act), *((k, free) for k, free in run if isinstance(code[k], Free))]
