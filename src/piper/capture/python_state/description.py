"""Functions, classes and what they read, as text that is the same in every process."""

import hashlib
import sys
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture.python_state.leaves import token
from piper.capture.python_state.ownership import codes_of, is_own_module
from piper.capture.python_state.places import Root, Walk, holder_token, is_leaf
from piper.capture.python_state.reach import reach_of
from piper.capture.torch_private import is_real

HOLDERS = (CellType, partial, tuple, list, dict)  # nothing but what they hold
# transformers keeps the hash of a configuration, and Python salts hashes in each process.
SALTED = "_original_object_hash"


def described(name: str, value: Any, model: nn.Module | None = None) -> dict[str, str]:
    """What a function or object that the user gives consists of: options, code, what it reads.

    But not what the model is that it may hold.
    """
    reach, found = reach_of((name, value), ran=False), dict[str, list[str]]()
    known = {id(one) for one in (model.modules() if model is not None else ())}
    walk = Walk(closed=lambda one: id(one) in known or isinstance(one, ModuleType))
    for place in walk.of(root for root in reach.roots if not is_of_library(root)):
        if place.key == SALTED:
            continue
        if reach.reads(place.names) and type(place.value) not in HOLDERS:
            found.setdefault(place.path, []).append(text_of(place.value))
    return {path: " ".join(texts) for path, texts in found.items()}


def is_of_library(root: Root) -> bool:
    """Whether it is a global of a library, whose tables may be made of sets in any order."""
    named = root.container.get("__name__") if isinstance(root.container, dict) else None
    module = sys.modules.get(named) if isinstance(named, str) else None
    return module is not None and vars(module) is root.container and not is_own_module(module)


def text_of(value: Any) -> str:
    """A value as text without addresses. What it holds has texts of its own."""
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, FunctionType):
        codes = codes_of(value.__code__)
        return f"{value.__qualname__} {_digest(repr([*map(_of_code, codes)]))}"
    if isinstance(value, torch.device):
        return value.type  # its number differs between processes
    kind, *rest = token(value) if is_leaf(value) else holder_token(value)
    return ".".join(map(str, rest)) or str(kind)


def _of_code(code: CodeType) -> tuple[Any, ...]:
    constants = [token(one) for one in code.co_consts if not isinstance(one, CodeType)]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _of_tensor(value: Tensor) -> str:
    kind = f"{value.dtype} {list(value.shape)}"
    if not is_real(value) or value.is_meta:
        return kind
    values = _digest(repr(value.detach().cpu().flatten().tolist()))
    grad = value.grad if value.is_leaf else None
    rest = "" if grad is None else f" with a gradient {_of_tensor(grad)}"
    return f"{kind} {values}{' of autograd' if value.requires_grad else ''}{rest}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
