"""Optimizers that assign new memory to a parameter: `p.data = p.data - lr * p.grad`.

Plans compute with the memory that a parameter had. So what was assigned is copied there.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from piper.errors import InputError
from piper.runtime.optimizers.known_optimizers import is_torchs
from piper.runtime.torch_private import has_own_step, users_of


@contextmanager
def memory_kept(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> Iterator[None]:
    """After a step inside, the parameters have the memory that they had before."""
    if is_torchs(type(optimizer)) and not has_own_step(optimizer):
        yield
        return
    before = [one.data for one in parameters]
    users = {place(one): users_of(one) for one in before}
    yield
    refuse_frozen(optimizer, parameters)
    moved = [
        (parameter, memory)
        for parameter, memory in zip(parameters, before, strict=True)
        if layout(parameter) != layout(memory)
    ]
    for parameter, memory in moved:
        keep_state(optimizer.state.get(parameter, {}), memory)
    refuse_kept(optimizer, [one for own, one in moved if not shares(own, one)], users)
    for parameter, memory in moved:
        follow(optimizer, optimizer.state.get(parameter, {}), parameter.data, memory)
        new = parameter.data
        memory.copy_(new.clone() if shares(new, memory) else new)
        parameter.data = memory


def keep_state(held: dict[str, Any], memory: torch.Tensor) -> None:
    """What the optimizer keeps there are old values, which the new ones would overwrite."""
    for key, value in held.items():
        if isinstance(value, torch.Tensor) and shares(value, memory):
            held[key] = value.clone()


def follow(
    optimizer: torch.optim.Optimizer, held: dict[str, Any], new: torch.Tensor, memory: torch.Tensor
) -> None:
    """State that is the parameter's new memory changes with it from now on."""
    for key, value in held.items():
        if isinstance(value, torch.Tensor) and shares(value, new):
            if value.shape != new.shape or value.stride() != new.stride():
                raise kept(optimizer)
            held[key] = memory


def refuse_kept(
    optimizer: torch.optim.Optimizer, left: Sequence[torch.Tensor], users: dict[int, int]
) -> None:
    """Old memory that somebody keeps has old values in plain PyTorch."""
    fewer = Counter(map(place, left))
    if any(users_of(one) > users[place(one)] - fewer[place(one)] for one in left):
        gc.collect()
    if any(users_of(one) > users[place(one)] - fewer[place(one)] for one in left):
        raise kept(optimizer)


def kept(optimizer: torch.optim.Optimizer) -> InputError:
    return InputError.of(
        "optimizer",
        f"the step of {type(optimizer).__name__} keeps the memory of a parameter to which it then "
        "assigns another (p.data = ...): Piper writes new values to that memory",
        "keep p.detach().clone(), or tensors of the parameter's shape in self.state[p]",
    )


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


def refuse_frozen(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> None:
    """Backward graphs compute gradients for what was trained when they were made."""
    if not all(one.requires_grad for one in parameters):
        raise InputError.of(
            "optimizer",
            f"the step of {type(optimizer).__name__} sets requires_grad of a parameter, to which a "
            "captured backward still gives gradients",
            "multiply its update by zero in the step; or call requires_grad_(False) on the model, "
            "and make a new Trainer with it",
        )


def refuse_aliases(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> None:
    """State, or the parameter, that is moved to the host no longer changes with the other."""
    if is_torchs(type(optimizer)):
        return
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and shares(value, parameter):
                raise InputError.of(
                    "optimizer",
                    f"{type(optimizer).__name__} keeps a parameter itself in state[{key!r}], not a "
                    "copy: it changes with the parameter, and in host memory it would not",
                    "keep p.detach().clone(); or leave out offload",
                )
