"""What no training step has used, so that no device holds it: an older checkpoint has it, or only
the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from piper.errors import CaptureError, some_names
from piper.runtime.checkpoint.model_names import model_tensors
from piper.runtime.checkpoint.pieces import Pieces, chunks
from piper.runtime.state.device_state import HeldPart, Origin

Initial = Callable[[str], torch.Tensor]  # the first value of a parameter or buffer


@dataclass(frozen=True)
class Unused:
    """Parameters and buffers that no step has used since the run began, or went on."""

    origin: Origin | None
    there: frozenset[str]  # what the older checkpoint has of them
    own: tuple[str, ...]  # what only the model has

    def pieces(self, initial: Initial) -> Pieces:
        """To be saved again, so that they are the same in a model made anew."""
        older = self.origin.pieces(self.there) if self.origin and self.there else []
        return [*older, *(piece for name in self.own for piece in own_pieces(name, initial))]


def unused(origin: Origin | None, used: set[str], model: nn.Module) -> Unused:
    """`used` has the names of what devices hold, and those of its tensors that are tied."""
    tensors = model_tensors(model)
    tied = {name for one in tensors if not used.isdisjoint(one.names) for name in one.names}
    there = frozenset(origin.known if origin else ()) - used - tied
    rest = (one for one in tensors if tied.isdisjoint(one.names))
    return Unused(origin, there, tuple(one.name for one in rest if there.isdisjoint(one.names)))


def own_pieces(name: str, initial: Initial) -> Pieces:
    """Nothing, if it has no value: a model on `meta` may not say how to fill what it never uses."""
    try:
        value = initial(name)
    except (CaptureError, KeyError):  # or it has this name only in the state dict
        return []
    part = HeldPart(name, 0, value.shape, nn.Parameter(value, requires_grad=False))
    return list(chunks(part, "", value))


def unsaved(reader: Origin, model: nn.Module) -> Iterator[str]:
    """A warning for what an older version of Piper has not saved, or what had no value."""
    own = (one for one in model_tensors(model) if {one.name, *one.names}.isdisjoint(reader.known))
    if names := [one.name for one in own]:
        yield (
            f"the checkpoint does not have {some_names(names)}, which no training step uses: they "
            "keep the values of this model; if the run that was saved had others, load them into "
            "the model before you make the Trainer"
        )
