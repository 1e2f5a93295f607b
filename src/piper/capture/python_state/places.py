"""Where values are kept: attributes, items, variables of closures, globals, class attributes."""

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import attrgetter, methodcaller
from types import CellType, FunctionType, MappingProxyType, MethodType
from typing import Any
from weakref import ref as Weak

from torch import Tensor, nn

from piper.capture.observers import is_observer
from piper.capture.python_state.function_caches import meet
from piper.capture.python_state.leaves import SIMPLE, Token, is_flat, is_generator, of_flat, token
from piper.capture.python_state.ownership import (
    is_followed,
    is_own_class,
    is_own_function,
    is_read_by_name,
    is_users_function,
    is_walked,
)
from piper.capture.torch_private import is_real, own_buffers, own_modules, own_parameters

FACTORY = "default_factory()"  # of a defaultdict, beside its keys
MOST = 2_000_000  # places that are looked at: an endless structure must not stop a capture
_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}  # torch calls them
_OF_TORCH = frozenset(vars(nn.Module())) - {"training", *_HOOKS}
_OF_CLASSES = {"__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__slots__",
               "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__",
               "__dataclass_params__", "__match_args__", "__hash__", "__static_attributes__",
               "__firstlineno__"}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A key of a container, with what is there."""

    container: Any
    key: Any
    path: str  # as a user would write it
    names: tuple[str, ...]  # names of attributes and variables, by which code reads it
    value: Any

    @property
    def token(self) -> Token:
        return token(self.value) if is_leaf(self.value) else holder_token(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """A place from which the user's code begins to read, such as a global."""

    container: Any
    key: Any
    path: str
    names: tuple[str, ...]


GETTERS = (attrgetter, methodcaller)  # which hold nothing but names


@dataclass
class Walk:
    """Goes through everything that can be reached from some roots, each value once."""

    seen: dict[int, Place] = field(default_factory=dict)  # by id of the value, which stays alive
    met: list[Any] = field(default_factory=list)  # functions and classes on the way
    tensors: list["Place"] = field(default_factory=list)
    closed: Callable[[Any], bool] | None = None  # values that are not looked into

    def of(self, roots: Iterable[Root]) -> Iterator[Place]:
        for root in roots:
            if (held := get(root.container, root.key)) is not ABSENT:
                yield from self.below(Place(root.container, root.key, root.path, root.names, held))

    def below(self, first: Place) -> Iterator[Place]:
        stack = [first]
        while stack and len(self.seen) < MOST:
            place = stack.pop()
            yield place
            value = place.value
            meet(value)
            if isinstance(value, Tensor):
                self.tensors.append(place)
            if isinstance(value, GETTERS):
                self.met.append(value)
            if is_leaf(value) or id(value) in self.seen or (self.closed and self.closed(value)):
                continue
            self.seen[id(value)] = place
            if is_flat(value):
                continue
            if isinstance(value, type | FunctionType | nn.Module) or is_own_class(type(value)):
                self.met.append(value)
            stack.extend(reversed([below(place, key, inner) for key, inner in contents(value)]))


def holder_token(value: Any) -> Token:
    """What is known of a container, besides what it holds: its class, or its code."""
    match value:
        case FunctionType():
            return ("function", value.__code__)
        case type():
            return ("class", value.__module__, value.__qualname__)
        case _ if is_flat(value):
            return of_flat(value)
        case int() | float() | str() | bytes():  # of a class of the user
            return ("holder", type(value).__qualname__, _plain(value))
    return ("holder", type(value).__qualname__)


def _plain(value: Any) -> str:
    base = next(base for base in (int, float, str, bytes) if isinstance(value, base))
    return str(base.__repr__(value))


def contents(value: Any) -> list[tuple[Any, Any]]:
    """What a value holds, but for Piper's own functions and for observers."""
    return contents_among(value, children(value))


def contents_among(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    if is_flat(value):
        return found
    return [(key, one) for key, one in found if not is_pipers(one) and not is_observer(one)]


def is_pipers(value: Any) -> bool:
    """Functions and objects of Piper, such as the hooks that tag regions."""
    made_by = value if isinstance(value, FunctionType) else type(value)
    module = str(getattr(made_by, "__module__", ""))
    return module.startswith("piper.") and not module.startswith("piper.models")


def is_leaf(value: Any) -> bool:
    return (
        type(value) in SIMPLE
        or isinstance(value, Tensor | Enum)
        or is_generator(value)
        or not (isinstance(value, _HOLDING) or _has_fields(value))
    )


_HOLDING = (nn.Module, dict, list, tuple, deque, CellType, MethodType, partial, staticmethod,
            classmethod, property, MappingProxyType, Weak, ContextVar)  # fmt: skip


def _has_fields(value: Any) -> bool:
    if isinstance(value, type):
        return is_own_class(value) or is_users_function(value)
    if isinstance(value, FunctionType):
        return is_followed(value)
    return is_walked(type(value)) and (hasattr(value, "__dict__") or hasattr(value, "__slots__"))


def children(value: Any) -> list[tuple[Any, Any]]:
    """What a value holds, by key."""
    match value:
        case nn.Module():
            own = [(key, one) for key, one in vars(value).items() if not _is_internal(key)]
            return [*own, *own_modules(value).items(), *_registered(value)]
        case dict():
            return items_of(value) + _beside(value)
        case list() | tuple() | deque():
            items = list(enumerate(_base(value).__iter__(value)))
            return items + (_fields(value) if type(value) is not _base(value) else [])
        case CellType():
            return _of_cell(value)
        case FunctionType():
            return _of_function(value)
        case MethodType():
            return [("__self__", value.__self__), ("__func__", value.__func__)]
        case partial():
            return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
        case staticmethod() | classmethod():
            return [("__func__", value.__func__)]
        case property():
            return [("fget", value.fget), ("fset", value.fset), ("fdel", value.fdel)]
        case MappingProxyType():
            return list(value.items())
        case Weak():
            return [("()", value())]
        case ContextVar():
            return _of_variable(value)
        case type():
            own = [(key, one) for key, one in vars(value).items() if key not in _OF_CLASSES]
            return [*own, *_of_metaclass(type(value))]
    return _fields(value)


def _of_variable(variable: ContextVar[Any]) -> list[tuple[Any, Any]]:
    try:
        return [("get()", variable.get())]
    except LookupError:  # empty
        return []


def _beside(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """What a dict of another class has besides its items."""
    made = [(FACTORY, value.default_factory)] if isinstance(value, defaultdict) else []
    return made + (_fields(value) if type(value) is not dict else [])


def _registered(module: nn.Module) -> list[tuple[str, Any]]:
    """What a forward has registered while it was traced. Other buffers are inputs of a graph."""
    held = (*own_buffers(module).items(), *own_parameters(module).items())
    return [(key, one) for key, one in held if one is not None and not is_real(one)]


def _of_metaclass(kind: type) -> list[tuple[Any, Any]]:
    return [("__class__", kind)] if is_own_class(kind) else []


def items_of(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """In their order. What a subclass overrides may do anything."""
    return list((OrderedDict if isinstance(value, OrderedDict) else dict).items(value))


def _base(value: Any) -> Any:
    """Python's own class of a list, tuple or deque. What a subclass overrides may do anything."""
    return next(base for base in (list, tuple, deque) if isinstance(value, base))


def _is_internal(key: str) -> bool:
    return key in _OF_TORCH or key.startswith("_piper")


def _of_cell(cell: CellType) -> list[tuple[Any, Any]]:
    try:
        return [("cell_contents", cell.cell_contents)]
    except ValueError:  # empty
        return []


def _of_function(function: FunctionType) -> list[tuple[Any, Any]]:
    code = function.__code__
    cells = list(zip(code.co_freevars, function.__closure__ or (), strict=True))
    if not is_own_function(function):  # functools.singledispatch keeps a cache, too
        kept = [item for item in vars(function).items() if isinstance(item[1], _OF_DECORATORS)]
        return [*cells, *kept]
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    held = [*zip(positional, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
    return [*cells, *held, *vars(function).items()]


def _fields(value: Any) -> list[tuple[Any, Any]]:
    found = list(vars(value).items()) if hasattr(value, "__dict__") else []
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found.append((name, getattr(value, name)))
    return found


_OF_DECORATORS = (FunctionType, MappingProxyType)  # around functions: what they call
_WRAPPERS = (CellType, MethodType, partial, staticmethod, classmethod, property, Weak, ContextVar)


def below(place: Place, key: Any, value: Any) -> Place:
    """A place inside what another place holds."""
    holder = place.value
    if isinstance(holder, dict | list | tuple | deque) and not isinstance(key, str):
        return Place(holder, key, f"{place.path}[{key!r}]", place.names, value)
    if isinstance(holder, dict | MappingProxyType):
        return Place(holder, key, f"{place.path}[{key!r}]", place.names, value)
    if isinstance(holder, _WRAPPERS):
        return Place(holder, key, place.path, place.names, value)
    if isinstance(holder, FunctionType):
        names = (key,) if is_own_function(holder) else place.names
        return Place(holder, key, f"{key} in {holder.__qualname__}", names, value)
    if isinstance(holder, type):
        return Place(holder, key, f"{holder.__name__}.{key}", (key,), value)
    if isinstance(holder, nn.Module):
        return Place(holder, key, f"{place.path}.{key}".lstrip("."), _names_in(holder, key), value)
    names = (*place.names, key) if is_read_by_name(type(holder)) else place.names
    return Place(holder, key, f"{place.path}.{key}", names, value)


def _names_in(module: nn.Module, key: str) -> tuple[str, ...]:
    """Modules of torch and of libraries are assumed to read all of their attributes."""
    return (key,) if is_own_class(type(module)) and key not in _HOOKS else ()


ABSENT = object()


def get(container: Any, key: Any) -> Any:
    """What is at a key now, or ABSENT."""
    if isinstance(container, dict):
        return container.get(key, ABSENT)
    if isinstance(container, type):
        return vars(container).get(key, ABSENT)
    return next((value for name, value in children(container) if name == key), ABSENT)


def put(container: Any, key: Any, value: Any) -> None:
    """Put a value into a place, or ABSENT to empty it. Tuples stay as they are."""
    match container:
        case nn.Module() if key in own_modules(container):
            own_modules(container)[key] = value
        case nn.Module() if key in own_buffers(container):
            _put_item(own_buffers(container), key, value)
        case nn.Module() if key in own_parameters(container):
            _put_item(own_parameters(container), key, value)
        case nn.Module():
            _put_item(vars(container), key, value)
        case defaultdict() if key == FACTORY:
            container.default_factory = value
        case dict() if key in container or key not in getattr(container, "__dict__", {}):
            _put_item(container, key, value)
        case list() | deque() if isinstance(key, int):
            container[key] = value
        case FunctionType() if key not in vars(container):
            return
        case tuple() | MethodType() | partial() | staticmethod() | classmethod() | property():
            return
        case MappingProxyType() | Weak() | ContextVar():
            return
        case _ if value is ABSENT:
            delattr(container, key)
        case type() | threading.local():
            setattr(container, key, value)
        case _:
            object.__setattr__(container, key, value)


def _put_item(held: dict[Any, Any], key: Any, value: Any) -> None:
    if value is ABSENT:
        held.pop(key, None)
    else:
        held[key] = value
