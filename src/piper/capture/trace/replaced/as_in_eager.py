"""Calls of torch that a trace would not see, or see otherwise than eager training does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from piper.capture import autograd_refusals, refusals
from piper.capture.source_lines import current_line
from piper.capture.torch_private import inside_trace
from piper.capture.trace.arguments.layouts import hear


class AsInEager(torch.overrides.TorchFunctionMode):
    """What a trace would not see, or see otherwise, is done as in eager training, or refused.

    One mode for all: every call of torch passes through each that is open.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hear(func, args)
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


def _hook(*_: Any, **__: Any) -> Any:
    """Activations of a trace have no gradients that a hook could see."""
    raise refusals.gradient_hook(current_line())


def _derivative(*_: Any, **__: Any) -> Any:
    raise refusals.own_backward()


def _assigned_data(*_: Any) -> Any:
    raise autograd_refusals.assigned_data(current_line())


def _data(tensor: Tensor, *_: Any) -> Tensor:
    """`.data` leaves no node; detach means the same here, and does."""
    return tensor.detach()


def _of_history(read: Callable[..., Any]) -> Callable[..., Any]:
    """What a model sees has no history; what is inside the trace has."""
    return lambda tensor, *rest: read(inside_trace(tensor), *rest)


def _grad_fn(tensor: Tensor, *_: Any) -> Any:
    return _watched(inside_trace(tensor).grad_fn)


def _set_requires_grad(tensor: Tensor, wanted: bool = True) -> Tensor:
    """Of a parameter it decides what is trained. On other tensors it changes no gradient."""
    if inside_trace(tensor).requires_grad == wanted:
        return tensor
    if isinstance(tensor, nn.Parameter):
        raise autograd_refusals.changed_requires_grad(current_line())
    return tensor.requires_grad_(wanted)


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Gradients of a copy do not reach what was copied."""
    return memo.setdefault(id(tensor), tensor.detach().clone())


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """In place, it would be traced as the numbers it draws, so it runs on a copy."""
    found = torch.nn.functional.dropout(input, p, training)
    return input.copy_(found) if inplace else found


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """On tensors without values, it compares, and the result lies in memory as they do."""
    return torch.nn.functional.one_hot(tensor, num_classes).contiguous()


class WatchedNode:
    """A node of autograd's graph, which may be looked at. A trace would not call its hooks."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            return _hook
        return getattr(self._node, name)

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        return tuple((_watched(node), k) for node, k in self._node.next_functions)


Node.register(WatchedNode)


def _watched(node: Node | None) -> WatchedNode | None:
    """Of a class with the same name, since that is what models ask for."""
    return type(type(node).__name__, (WatchedNode,), {})(node) if node is not None else None


_INSTEAD: dict[Any, Callable[..., Any]] = {
    Tensor.data.__get__: _data,
    Tensor.data.__set__: _assigned_data,
    Tensor.requires_grad.__get__: _of_history(Tensor.requires_grad.__get__),
    Tensor.is_leaf.__get__: _of_history(Tensor.is_leaf.__get__),
    Tensor.grad_fn.__get__: _grad_fn,
    Tensor.requires_grad.__set__: _set_requires_grad,
    Tensor.requires_grad_: _set_requires_grad,
    Tensor.__deepcopy__: _deepcopy,
    torch.nn.functional.one_hot: _one_hot,
    Tensor.register_hook: _hook,
    Tensor.register_post_accumulate_grad_hook: _hook,
    Tensor.retain_grad: lambda *_: None,  # nothing reads it in a step
    Tensor.backward: _derivative,
    torch.autograd.grad: _derivative,
    torch.autograd.backward: _derivative,
    torch.nn.functional.dropout: _dropout,
}
