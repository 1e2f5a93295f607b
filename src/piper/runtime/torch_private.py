"""Every private API of PyTorch that the runtime uses. The same in 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._ops import OpOverload
from torch.nn.modules.dropout import _DropoutNd as DropoutModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DropoutModule", "TorchDispatchMode", "pytree"]  # re-exported

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm


def last_call(error: Exception) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The operator that raised an error, and what it was given. None: it is not known."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    found = {} if trace is None else trace.tb_frame.f_locals
    operator = found.get("self")
    return (operator, found["args"]) if isinstance(operator, OpOverload) else None


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, name, None) for name in names)


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether someone has replaced the step of its class. A scheduler only counts its calls."""
    own = vars(optimizer).get("step")
    return own is not None and not hasattr(own, "_wrapped_by_lr_sched")


def bare_optimizer(like: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One of the same class without parameters or state, which no scheduler knows."""
    made = object.__new__(type(like))
    made.__dict__.update({name: one for name, one in vars(like).items() if name != "step"})
    return made


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell its scheduler that its parameters were updated."""
    optimizer._opt_called = True


def has_gradient_hooks(parameter: torch.nn.Parameter) -> bool:
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, name, None) for name in names)


def release_pool(device: int, pool: Any) -> None:
    """Close the memory pool of a CUDA graph whose capture could not be ended."""
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


def free_workspaces() -> None:
    """Those of cuBLAS, which torch keeps for each stream that a product ever ran on."""
    torch._C._cuda_clearCublasWorkspaces()


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor has the same memory."""
    alone = torch.empty(0).untyped_storage()
    count = torch._C._storage_Use_Count
    return count(tensor.untyped_storage()._cdata) > count(alone._cdata) + 1


def users_of(tensor: torch.Tensor) -> int:
    """How many tensors have its memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def set_allocator(setting: str) -> None:
    """Change a setting of the allocator of GPU memory. All others get their defaults."""
    torch._C._accelerator_setAllocatorSettings(setting)


def storage_at(address: int, device: torch.device, size: int) -> torch.UntypedStorage:
    """A storage on memory that something else owns."""
    return torch._C._construct_storage_from_data_pointer(address, device, size)


def shared_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What another process of this host needs to open the memory of a tensor on a GPU."""
    found = tensor.untyped_storage()._share_cuda_()
    return tuple(one.hex() if isinstance(one, bytes) else one for one in found)


def opened_memory(shared: tuple[Any, ...]) -> torch.Tensor:
    """The memory that another process shares, as bytes."""
    found = (bytes.fromhex(one) if isinstance(one, str) else one for one in shared)
    storage = torch.UntypedStorage._new_shared_cuda(*found)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout in the options of a process group."""
    options._timeout = timeout


def has_input_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks of the user's may change what its forward is called with."""
    hooks = module._forward_pre_hooks.values()
    return any(getattr(hook, "changes_inputs", True) for hook in hooks)  # Piper's own do not


def loads_in_its_own_way(model: torch.nn.Module) -> bool:
    """Whether code that is not torch's or Piper's has a part in `load_state_dict`."""
    return any(
        not getattr(function, "__module__", "").startswith(("torch.", "piper."))
        for module in model.modules()
        for function in (
            type(module).load_state_dict, type(module)._load_from_state_dict,
            *module._load_state_dict_pre_hooks.values(),
            *module._load_state_dict_post_hooks.values(),
        )
    )  # fmt: skip


def extra_states(model: torch.nn.Module) -> set[str]:
    """The names under which modules save what `get_extra_state` gives."""
    suffix = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
    return {f"{name}.{suffix}" if name else suffix for name, _ in model.named_modules()}


def writes_of(tensor: torch.Tensor) -> int:
    """How many writes to it torch has counted."""
    return tensor._version


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors to which an operator writes."""
    schema = func._schema
    for place, argument in enumerate(schema.arguments if schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (one for one in pytree.tree_leaves(given) if isinstance(one, torch.Tensor))
