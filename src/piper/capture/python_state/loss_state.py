"""The loss function in a trace. Buffers that it updates are carried like those of the model."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture.python_state.places import Root
from piper.capture.python_state.reach import Reach, places, reach_of
from piper.capture.python_state.snapshot import Change
from piper.capture.python_state.tensor_attributes import attribute_roots
from piper.capture.torch_private import GLOBAL_HOOKS, is_real, own_buffers, own_parameters

Loss = Callable[[Any, Any], Tensor]
OWNER = "(loss)"  # no module of a model can have this name


def loss_buffers(loss_fn: Any) -> dict[str, Tensor]:
    """The buffers of a loss function that is a module, by the names that they have in buckets."""
    named = loss_fn.named_buffers() if isinstance(loss_fn, nn.Module) else ()
    return {f"{OWNER}.{name}": buffer for name, buffer in named}


def reach_of_both(model: nn.Module, loss_fn: Any) -> Reach:
    """What can be reached from a model and a loss, with the buffers of the loss."""
    reach = reach_of(("model", model), ("loss_fn", loss_fn))
    reach.roots += [Root(scope, name, name, ()) for scope, name in GLOBAL_HOOKS]
    for path, module in loss_fn.named_modules() if isinstance(loss_fn, nn.Module) else ():
        held = own_buffers(module)
        reach.roots += [Root(held, name, f"loss_fn.{path}.{name}", (name,)) for name in held]
    reach.names.update(name for root in reach.roots for name in root.names)
    reach.roots += attribute_roots(tensors_of(model, loss_fn, reach))
    return reach


def tensors_of(model: nn.Module, loss_fn: Any, reach: Reach) -> list[tuple[str, Tensor]]:
    """Parameters, buffers, and other tensors that code may read, each with a path."""
    own = [one for one in (model, loss_fn) if isinstance(one, nn.Module)]
    named = [each for one in own for each in (*one.named_parameters(), *one.named_buffers())]
    named += [(place.path, place.value) for place in reach.tensors]
    return list({id(one): (path, one) for path, one in named if is_real(one)}.values())


def reach_with_others(model: nn.Module, loss_fn: Any) -> Reach:
    """The same, with the tensors of modules that are not the model's: teachers, discriminators.

    They are constants of a graph, and a loop may load others into them.
    """
    reach = reach_of_both(model, loss_fn)
    known = {id(one) for one in (*model.parameters(), *model.buffers())}
    held = [one for one in places(reach) if isinstance(one.value, nn.Module)]
    for place in held:
        for fields in (own_parameters(place.value), own_buffers(place.value)):
            for name, tensor in fields.items():
                if tensor is not None and id(tensor) not in known:
                    known.add(id(tensor))
                    reach.roots.append(Root(fields, name, f"{place.path}.{name}", ()))
    return reach


class LossCopy:
    """A copy of the loss that a trace may change, with some of its buffers as inputs."""

    def __init__(self, loss_fn: Loss | None, model: nn.Module, carried: Iterable[str]) -> None:
        self.call = copied(loss_fn, model)
        found = loss_buffers(loss_fn)
        self.buffers = {name: found[name] for name in carried}

    def bound(self, state: dict[str, Tensor]) -> Loss | None:
        """The loss with these values of its buffers. New values are put into the same dict."""
        if not self.buffers or not isinstance(self.call, nn.Module):
            return self.call
        module = self.call

        def call(output: Any, target: Any) -> Tensor:
            own = {name.removeprefix(f"{OWNER}."): state[name] for name in self.buffers}
            loss: Tensor = torch.func.functional_call(module, own, (output, target))
            state.update({f"{OWNER}.{name}": value for name, value in own.items()})
            return loss

        return call

    def changed(self, changes: Iterable[Change]) -> list[str]:
        """The names of the buffers that a trace has changed, with their shapes as before."""
        if not isinstance(self.call, nn.Module):
            return []
        places = {
            (id(own_buffers(module)), name): f"{OWNER}.{path}.{name}".replace("..", ".")
            for path, module in self.call.named_modules()
            for name in own_buffers(module)
        }
        found = ((places.get((id(c.place.container), c.place.key)), c) for c in changes)
        return [name for name, change in found if name and keeps_its_form(change)]


def keeps_its_form(change: Change) -> bool:
    before, after = (one and one.value for one in (change.before, change.after))
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and (before.shape, before.dtype) == (after.shape, after.dtype)
    )


def copied(loss_fn: Loss | None, model: nn.Module) -> Loss | None:
    """A copy that shares parameters, and the model, if it has that, or what is registered in it."""
    if not isinstance(loss_fn, nn.Module):
        return loss_fn
    modules = list(model.modules())
    inside = any(one is loss_fn for one in modules)
    held = (*model.parameters(), *model.buffers(), *loss_fn.parameters())
    shared = held if inside else (*held, *modules)
    try:
        return copy.deepcopy(loss_fn, {id(one): one for one in shared})
    except Exception:  # then the trace uses the loss itself, and puts back what it changes
        return loss_fn
