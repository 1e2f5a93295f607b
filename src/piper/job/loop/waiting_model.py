"""Move the user's model out of the memory of a GPU while the Trainer trains its own copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture.torch_private import storage_id

PLAIN = (Tensor, nn.Parameter)


class WaitingModel:
    """A model in host memory. It returns to its device when it is called or loaded.

    Plain training has the weights once on a GPU. With the user's model beside the Trainer's copy,
    it would be twice.
    """

    changes_inputs = False  # of the forward before which it is called

    def __init__(self, model: nn.Module, kind: str = "cuda") -> None:
        """Tensors on devices of this kind are moved."""
        self.homes: dict[torch.device, list[Tensor]] = {}
        for tensor in plain_tensors(model):
            if tensor.device.type == kind:
                self.homes.setdefault(tensor.device, []).append(tensor)
        for device, tensors in self.homes.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the Trainer may still be reading them
            move(tensors, torch.device("cpu"))
        hooks = model.register_forward_pre_hook, model.register_load_state_dict_pre_hook
        self.handles = [register(self) for register in hooks] if self.homes else []

    def __call__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Bring it back. A tensor that the user has moved in the meantime stays where it is."""
        for handle in self.handles:
            handle.remove()
        for device, tensors in self.homes.items():
            move([one for one in tensors if one.device.type == "cpu"], device)
        self.homes, self.handles = {}, []

    def __deepcopy__(self, _: Any) -> Returned:
        return Returned()

    def __reduce__(self) -> tuple[type[Returned], tuple[()]]:
        return Returned, ()


class Returned:
    """The hook of a copy of the model, which does nothing."""

    def __call__(self, *_: Any) -> None: ...


def plain_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once, without subclasses of tensors."""
    found = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in found if type(tensor) in PLAIN]


def move(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Put tensors into other memory, in place. Those that share memory still do."""
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # old, new
    for tensor in tensors:
        old, key = tensor.untyped_storage(), storage_id(tensor)
        if key not in moved:
            new = torch.UntypedStorage(old.nbytes(), device=device)
            moved[key] = old, new.copy_(old, non_blocking=False)
        empty, (_, new) = torch.empty(0, dtype=tensor.dtype, device=device), moved[key]
        tensor.data = empty.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
