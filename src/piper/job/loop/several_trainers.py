"""Several Trainers that share parameters: each trains its own copy, and none sees the other's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from piper.capture.python_state.reach import places, reach_of
from piper.errors import InputError
from piper.job.loop.callers import callers_level
from piper.job.processes.consistency import Digests, has_values, tensor_digest

LOAD = (
    "`weights = trainer.state_dict()` in all processes, and `if weights is not None: "
    "model.load_state_dict(weights)`"
)
COPIES = "To compare strategies, give each Trainer a copy: copy.deepcopy(model)"
AGAIN = (
    "another Trainer has trained a copy of this model: this one starts with the weights from "
    f"before. To go on with those of the other: {LOAD}. {COPIES}, or load the first weights again"
)
BOTH = (
    "two Trainers train the same parameters, each its own copy: what one learns, the other does "
    "not see. Make one Trainer of a model that returns the loss of each kind of batch, or load a "
    f"checkpoint of one into the other (trainer.save, trainer.resume). {COPIES}"
)
READ = (
    "it reads a model that another Trainer trains, and would always see its first weights: the "
    "other Trainer has its own copy"
)
FROZEN = (
    "let the loss read a frozen copy of the model, and load the weights into it after each step: "
    "copy.load_state_dict(trainer.state_dict())"
)


@dataclass(eq=False)
class Training:
    """What a Trainer trains, and what its loss reads besides. Tensors are known by their ids."""

    tensors: dict[int, Tensor]
    taken: dict[int, str]  # digests of the values with which it began
    read: dict[int, Tensor]
    settle: Callable[[], None]  # ends the watch over its tensors: another one begins
    steps: int = 0
    loaded: bool = False  # whether weights were loaded into the model since the last step
    rivals: WeakKeyDictionary[Training, int] = field(default_factory=WeakKeyDictionary)

    def shared(self, others: dict[int, Tensor]) -> list[int]:
        return [key for key in self.tensors if key in others]

    def is_old(self, keys: list[int]) -> bool:
        """Whether these tensors still have their first values, though they were trained."""
        return bool(keys) and all(
            tensor_digest(self.tensors[key]) == self.taken[key] for key in keys
        )

    def after_step(self) -> None:
        self.steps, self.loaded = self.steps + 1, False
        if self.steps == 1:
            for other in _others(self):
                if other.steps and (_is_read(self, other) or _is_read(other, self)):
                    raise InputError.of("loss_fn", READ, FROZEN)
        for other in list(self.rivals):
            self.rivals[other] += 1
            if other.rivals.get(self):
                del self.rivals[other], other.rivals[self]
                _warn(BOTH)


_ALL: WeakSet[Training] = WeakSet()


def begin(model: nn.Module, loss_fn: Any, taken: Digests, settle: Callable[[], None]) -> Training:
    """Note a new Trainer, and warn if it would start from old weights."""
    found = {name: one for name, one in model.named_parameters() if one.requires_grad}
    known = {id(one): (one, taken[name]) for name, one in found.items() if name in taken}
    tensors = {key: one for key, (one, _) in known.items()}
    new = Training(
        tensors, {key: text for key, (_, text) in known.items()}, _read_by(loss_fn), settle
    )
    for other in _others(new):
        keys = other.shared(tensors)
        if keys:
            other.settle()
            other.rivals[new] = new.rivals[other] = 0
            old = other.steps and not other.loaded
            if old and all(other.taken[key] == new.taken[key] for key in keys):
                _warn(AGAIN)
    _ALL.add(new)
    return new


def _others(one: Training) -> list[Training]:
    return [other for other in _ALL if other is not one]


def _is_read(trained: Training, reader: Training) -> bool:
    keys = [key for key in trained.shared(reader.read) if key not in reader.tensors]
    return trained.is_old(keys)


def _read_by(loss_fn: Any) -> dict[int, Tensor]:
    """Parameters that a loss can reach: of modules that it holds, or by themselves."""
    return {id(one): one for one in _parameters(loss_fn) if has_values(one)}


def _parameters(loss_fn: Any) -> Iterator[Tensor]:
    for place in places(reach_of(("loss_fn", loss_fn))):
        if isinstance(place.value, nn.Module):
            yield from place.value.parameters()
        elif isinstance(place.value, nn.Parameter):
            yield place.value


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=callers_level())
