"""Attributes of modules that hold tensors, as buffers: a step carries them to the next one."""

from torch import Tensor, nn

from piper.capture import torch_private


def make_buffers(model: nn.Module, names: list[str]) -> None:
    """Register attributes that a forward carries from step to step. State dicts stay the same."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = vars(module).pop(leaf)
        module.register_buffer(leaf, tensor, persistent=False)


def unmake_buffers(model: nn.Module, names: list[str]) -> None:
    """The opposite of `make_buffers`."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = getattr(module, leaf)
        delattr(module, leaf)
        setattr(module, leaf, tensor)


def plain_attributes(model: nn.Module) -> list[str]:
    """Attributes of modules that are tensors, but neither parameters nor buffers."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and torch_private.is_real(value) and not value.requires_grad
    ]
