"""What a graph that came as text may call: an allow-list, and nothing that can name a file.

The text of a graph becomes Python code. So a name in it must be a plain identifier, and a function
must be one of those below, or an operator of torch's dispatcher that only computes.
"""

import keyword
import math
import operator
from collections.abc import Callable, Collection
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from piper.capture import refusals
from piper.capture.kernels.codegen import FUNCTIONS, METHODS, release
from piper.capture.kernels.traced_layout import as_traced
from piper.capture.torch_private import HigherOrderOperator, OpOverload, argument_types, is_custom

_ARITHMETIC = (
    "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "index", "invert", "le",
    "lshift", "lt", "matmul", "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift",
    "sub", "truediv", "xor",
)  # fmt: skip
_SYMBOLIC = [getattr(torch, name) for name in dir(torch) if name.startswith("sym_")]
BY_NAME: dict[str, Callable] = {  # all functions that a graph may call, apart from operators
    f"{prefix}.{found.__name__}": found
    for prefix, functions in {
        "operator": [getattr(operator, name) for name in _ARITHMETIC],
        "math": vars(math).values(),
        "torch": [*FUNCTIONS.values(), torch.narrow, *_SYMBOLIC],
        "piper": [release, as_traced],
        "builtins": [round],
    }.items()
    for found in functions
    if isinstance(found, BuiltinFunctionType | FunctionType)
}
_NAMES = {found: name for name, found in BY_NAME.items()}
_METHODS = frozenset({*METHODS.values(), "add_"})
_OPERATOR = "ops."  # before the name of an operator of torch's dispatcher
_COMPUTE = frozenset({"aten", "prims", "profiler", "piper"})  # text is an option here, not a name
_HIGHER_ORDER = frozenset(
    {
        "associative_scan", "cond", "flex_attention", "flex_attention_backward", "invoke_subgraph",
        "map_impl", "scan", "while_loop",
    }
)  # fmt: skip


def name_of(target: Any, where: str = "") -> str:
    """The name of a function, by which another process finds it. `where` is the user's line.

    >>> name_of(torch.mm), name_of(torch.ops.aten.mm.default)
    ('torch.mm', 'ops.aten.mm.default')
    """
    if isinstance(target, OpOverload) and _only_computes(target):
        return f"{_OPERATOR}{target}"
    if isinstance(target, HigherOrderOperator) and target.name() in _HIGHER_ORDER:
        return f"{_OPERATOR}higher_order.{target.name()}"
    if isinstance(target, OpOverload | HigherOrderOperator):  # triton's numbers differ by process
        raise refusals.cannot_be_sent(target.name(), where)
    if target not in _NAMES:
        raise refusals.cannot_be_sent(str(target), where)
    return _NAMES[target]


def function(name: str) -> Callable:
    """The function with a name, if a graph may call it."""
    if not name.startswith(_OPERATOR):
        if name not in BY_NAME:
            raise refusals.cannot_be_sent(name)
        return BY_NAME[name]
    found: Any = torch.ops
    for part in name.removeprefix(_OPERATOR).split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload | HigherOrderOperator) or name_of(found) != name:
        raise refusals.cannot_be_sent(name)
    return found


def target_of(op: str, name: Any, inside: Collection[str]) -> str:
    """The target of a node that calls no function: an argument, an attribute or a method."""
    match op:
        case "placeholder":
            return identifier(name)
        case "get_attr" if name in inside:
            return identifier(name)
        case "call_method" if name in _METHODS:
            return str(name)
        case "output" if name == "output":
            return str(name)
    raise refusals.cannot_be_sent(str(name))


def identifier(name: Any) -> str:
    """A name that can be written into code. Python's own names, as `__class__`, are not.

    >>> identifier("arg0_1")
    'arg0_1'
    """
    plain = isinstance(name, str) and name.isidentifier() and name.isascii()
    if not plain or keyword.iskeyword(name) or name.startswith("__"):
        raise refusals.cannot_be_sent(repr(name))
    return str(name)


def _only_computes(found: OpOverload) -> bool:
    """Whether an operator cannot reach a file: it takes no file name, or it is the user's own.

    >>> aten = torch.ops.aten
    >>> _only_computes(aten.gelu.default), _only_computes(aten.from_file.default)
    (True, False)
    """
    arguments = argument_types(found)
    if found.namespace in _COMPUTE:
        return "filename" not in arguments
    takes_text = any("str" in kind for kind in arguments.values())
    return is_custom(found) or not takes_text
