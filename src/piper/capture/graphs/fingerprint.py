"""A name for what a graph computes. Regions that differ only in their weights get the same one."""

import hashlib
import re
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

_SYMBOL = re.compile(r"\b[us]\d+\b")


def fingerprint(module: fx.GraphModule) -> str:
    """A digest of operations, arguments, constants, and the types of inputs."""
    digest = hashlib.sha256()
    numbers: dict[fx.Node, int] = {}
    symbols: dict[str, str] = {}

    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return f"%{numbers[argument]}"
        if isinstance(argument, list | tuple):
            return f"({','.join(map(text, argument))})"
        if isinstance(argument, dict):
            return (
                f"{{{','.join(f'{key}:{text(item)}' for key, item in sorted(argument.items()))}}}"
            )
        return repr(argument)

    for number, node in enumerate(module.graph.nodes):
        numbers[node] = number
        row = f"{node.op}|{_target(module, node)}|{text(node.args)}|{text(node.kwargs)}"
        # Symbols are numbered across the model, so equal regions have different ones.
        row = _SYMBOL.sub(lambda m: symbols.setdefault(m[0], f"${len(symbols)}"), row)
        digest.update(f"{row}\n".encode())
    return digest.hexdigest()


def _target(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "placeholder":
        tensor = node.meta.get("val")
        if not isinstance(tensor, Tensor):  # an attribute of a nested graph
            return "argument"
        return f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device.type}"
    if node.op == "get_attr":
        return _constant(getattr(module, node.target))
    if isinstance(node.target, FunctionType):  # its text would have an address
        return f"{node.target.__module__}.{node.target.__qualname__}"
    return str(node.target)


def _constant(constant: Any) -> str:
    if isinstance(constant, fx.GraphModule):  # a branch: its repr does not show what it does
        return fingerprint(constant)
    if not isinstance(constant, Tensor):
        return repr(constant)
    content = constant.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    kind = f"{tuple(constant.shape)}{constant.stride()}{constant.dtype}{constant.device.type}"
    return f"{kind}{hashlib.sha256(content).hexdigest()}"
