"""Whose code is it? State of the user's classes, functions and globals counts, torch's does not."""

import sys
from functools import cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from piper.capture.source_lines import is_users

# Of Python's own classes, those that hold what a program puts into them.
_HOLDERS = {"argparse", "collections", "dataclasses", "functools", "multiprocessing", "queue",
            "threading", "types", "weakref", "_thread", "_weakrefset"}  # fmt: skip

_DEEPEST = 4  # decorators, one around the other


def is_own_function(value: Any) -> bool:
    """Whether a function is the user's own, and not that of a library."""
    return isinstance(value, FunctionType) and (
        is_own_file(value.__code__.co_filename) or is_executed(value)
    )


def is_executed(function: FunctionType) -> bool:
    """Whether the user's code made it by `exec`, as dataclasses do for their methods."""
    scope = function.__globals__
    file = scope.get("__file__") or "<user>"
    return function.__code__.co_filename == "<string>" and is_own_file(file)


def is_followed(function: FunctionType) -> bool:
    """Whether it is the user's own, or a library's around one: `@torch.no_grad()` makes these."""
    return is_own_function(function) or _wraps_own(function, _DEEPEST)


def _wraps_own(function: FunctionType, depth: int) -> bool:
    cells = (get_cell(cell) for cell in function.__closure__ or ())
    inner = [
        one for one in (*cells, vars(function).get("__wrapped__")) if type(one) is FunctionType
    ]
    return any(is_own_function(one) for one in inner) or (
        depth > 0 and any(_wraps_own(one, depth - 1) for one in inner)
    )


def get_cell(cell: CellType) -> Any:
    """What a variable of a closure holds. None: nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@cache
def is_own_file(name: str) -> bool:
    return is_users(name) and not is_library(name)


def is_library(name: str) -> bool:
    return "site-packages" in name or "dist-packages" in name


def is_own_class(cls: type) -> bool:
    return is_users_class(cls) and not is_library(file_of(cls))


def is_users_function(cls: type) -> bool:
    """Whether a class is an autograd.Function of the user or of a library: its backward runs."""
    return issubclass(cls, torch.autograd.Function) and is_users_class(cls)


def is_users_class(cls: type) -> bool:
    """Whether a class is neither torch's nor Python's: the user's own, or of a library."""
    return _is_users(str(cls.__module__))


@cache
def _is_users(module: str) -> bool:
    root = module.split(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return False
    return is_users(_file(module))


def file_of(cls: type) -> str:
    """The file in which a class was defined."""
    return _file(str(cls.__module__))


@cache
def _file(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or "<user>"


def is_own_module(module: ModuleType) -> bool:
    """Whether a module is the user's. Piper may lie in a folder of his, with models as examples."""
    root, *rest = str(getattr(module, "__name__", "")).split(".")
    if root == "torch" or (root == "piper" and rest[:1] != ["models"]):
        return False
    if getattr(module, "__spec__", None) is None and not hasattr(module, "__file__"):
        return root not in sys.builtin_module_names  # made by hand, or typed in at a prompt
    file = getattr(module, "__file__", None)  # whatever a module's own `__getattr__` says
    return is_own_file(file if isinstance(file, str) else "site-packages")


def is_walked(cls: type) -> bool:
    """Whether the fields of an object are looked at, one by one."""
    module = str(cls.__module__)
    known = module.split(".")[0] in _HOLDERS or module.startswith("torch.distributions.")
    return is_users_class(cls) or known


def is_read_by_name(cls: type) -> bool:
    """Whether only code that names a field reads it: libraries may read all fields of their own."""
    return is_own_class(cls) or str(cls.__module__).split(".")[0] in ("argparse", "types")


def codes_of(code: CodeType) -> list[CodeType]:
    """A code object and those of the functions that are defined in it."""
    inner = [
        one for const in code.co_consts if isinstance(const, CodeType) for one in codes_of(const)
    ]
    return [code, *inner]
