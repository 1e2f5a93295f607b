"""A copy of a model that a trace may change."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from piper.capture import refusals, torch_private
from piper.capture.python_state.places import Place, Walk, children, is_leaf
from piper.capture.python_state.snapshot import Snapshot
from piper.capture.torch_private import own_modules
from piper.capture.trace import side_effects
from piper.capture.tracing_private import mark_parameter

COPIED = 2**24  # elements of an attribute; larger ones are shared with the trace


def throw_away(model: nn.Module, loss_fn: Any = None) -> nn.Module:
    """A copy of all modules that shares parameters, buffers and what is in their memory.

    What a trace caches or writes elsewhere dies with it. Hooks that are methods of the loss stay.
    """
    registered = {id(one): one for one in (*model.parameters(), *model.buffers())}
    held = filter(side_effects.has_memory, registered.values())
    memories = {side_effects.span(one)[0] for one in held}
    shared = {
        id(value): value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not can_be_copied(value, memories)
    }
    deeper = list(held_deeper(model))
    views = {id(one): one for one in deeper if isinstance(one, Tensor) and in_memory(one, memories)}
    stubborn = {id(one): one for one in deeper if isinstance(one, dict) and not says_how(one)}
    if not isinstance(loss_fn, nn.Module):  # which is copied itself
        shared[id(loss_fn)] = loss_fn
    try:
        return copy.deepcopy(model, registered | shared | views | stubborn)
    except Exception as error:
        raise refusals.cannot_copy(model, error, stubborn_attribute(model)) from error


def stubborn_attribute(model: nn.Module) -> str:
    """The first attribute of a module that cannot be copied."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not isinstance(value, nn.Module | Tensor) and name != "_modules":
                try:
                    copy.deepcopy(value)
                except Exception:
                    return ".".join(filter(None, ("model", path, name)))
    return ""


@contextmanager
def acting_as(model: nn.Module, view: nn.Module) -> Iterator[None]:
    """While this is open, the modules of a model have the attributes of those of its copy.

    A loss may read what the forward left in the model, which it knows, and not the copy.
    """
    modules, others = list(model.modules()), list(view.modules())
    pairs = list(zip(modules, others, strict=True)) if len(modules) == len(others) else []
    own = [vars(module) for module, _ in pairs]
    for module, other in pairs:
        object.__setattr__(module, "__dict__", vars(other))
    try:
        yield
    finally:
        for (module, _), attributes in zip(pairs, own, strict=True):
            object.__setattr__(module, "__dict__", attributes)


def run_with(view: nn.Module, state: dict[str, Tensor], *given: Any) -> Any:
    """As torch's `functional_call`, which leaves a module that has two names with the tensors of
    the call."""
    own = (vars(one)[name] for one in view.modules() for name in ("_parameters", "_buffers"))
    kept = [(one, dict(one)) for one in own]
    for name, _ in view.named_parameters(remove_duplicate=False):
        if name in state:
            mark_parameter(state[name])
    try:
        return torch.func.functional_call(view, state, *given)
    finally:
        for one, before in kept:
            one.update(before)


def knows_modules(modules: Sequence[nn.Module], state: Snapshot) -> bool:
    """Whether something outside of the copy knows modules of the model: by itself, by its id, or
    weakly. Code may then ask which module it is, and a copy is another one.
    """
    known = {id(one) for one in modules}

    def is_one(value: Any) -> bool:
        if isinstance(value, ReferenceType):
            value = value()
        if isinstance(value, set | frozenset):
            return any(map(is_one, value))
        return id(value) in known or (type(value) is int and value in known)

    keys = (key for order in state.orders.values() for key in order)
    return any(is_one(place.value) for place in state.places.values()) or any(map(is_one, keys))


@contextmanager
def with_own_children(modules: Sequence[nn.Module], view: nn.Module) -> Iterator[None]:
    """While this is open, inside `acting_as`, the modules of a model can run in place of copies."""
    others = list(view.modules())
    of = {id(other): module for module, other in zip(modules, others, strict=True)}
    before = [own_modules(other) for other in others]
    for other, held in zip(others, before, strict=True):
        vars(other)["_modules"] = {name: one and of[id(one)] for name, one in held.items()}
    try:
        yield
    finally:
        for other, held in zip(others, before, strict=True):
            vars(other)["_modules"] = held


def held_deeper(model: nn.Module) -> Iterator[Any]:
    """What lists, dicts and other objects that modules hold have in them, and they themselves."""
    walk = Walk()
    for module in model.modules():
        for key, value in children(module):
            if not isinstance(value, nn.Module) and not is_leaf(value):
                yield from (p.value for p in walk.below(Place(module, key, key, (), value)))


def says_how(value: Any) -> bool:
    """Whether an object can be asked how to copy it.

    A dict whose items are its attributes, `__getattr__ = dict.__getitem__`, raises a KeyError. A
    trace then uses the dict itself, and puts back what it changes.
    """
    try:
        getattr(value, "__deepcopy__", None)
    except Exception:
        return False
    return True


def in_memory(tensor: Tensor, memories: set[int]) -> bool:
    real = side_effects.has_memory(tensor) and torch_private.is_real(tensor)
    return real and side_effects.span(tensor)[0] in memories


def can_be_copied(tensor: Tensor, memories: set[int]) -> bool:
    """Whether a trace may get its own copy of an attribute. Views of parameters stay views."""
    small = tensor.is_leaf and tensor.numel() <= COPIED
    real = side_effects.has_memory(tensor) and torch_private.is_real(tensor)
    return small and real and side_effects.span(tensor)[0] not in memories


def aliases_in(model: nn.Module, first: dict[str, Tensor]) -> dict[str, str]:
    """Other names of tied parameters and buffers, with the first one."""
    names = {id(tensor): name for name, tensor in first.items()}
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: names[id(tensor)] for name, tensor in every if name not in first}
