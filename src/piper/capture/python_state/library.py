"""Functions of torch and of libraries that a program may replace: `torch.tanh = mine`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_, itemgetter
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from piper.capture.python_state.description import text_of
from piper.capture.python_state.leaves import SIMPLE
from piper.capture.python_state.ownership import is_own_class, is_own_module
from piper.capture.python_state.places import ABSENT, get
from piper.capture.python_state.reach import Reach
from piper.capture.tracing_private import is_compilers_wrapper

_OWNERS = (torch, torch.linalg, torch.special, torch.fft)


@dataclass(frozen=True, slots=True)
class Replaceable:
    """Names in a module or class, with the functions that they were at first."""

    path: str
    scope: Mapping[str, Any]
    before: dict[str, Any]
    absent: frozenset[str]  # names that a base class has
    pick: Callable[[Mapping[str, Any]], tuple[Any, ...]]  # what is there, in a faster way

    def is_as_before(self) -> bool:
        try:
            same = all(map(is_, self.pick(self.scope), self.before.values()))
        except KeyError:
            return False
        return same and self.scope.keys().isdisjoint(self.absent)

    def changes(self) -> Iterator[tuple[str, str]]:
        for name in (*self.before, *self.absent):
            now, before = (scope.get(name, ABSENT) for scope in (self.scope, self.before))
            if now is not before and not is_compilers_wrapper(now, before):
                yield f"{self.path}.{name}", "absent" if now is ABSENT else text_of(now)


def replaceable(model: nn.Module, reach: Reach) -> list[Replaceable]:
    """What the model's code names of libraries, and what modules of torch call."""
    found = [_functions_in("torch.nn.functional", vars(functional), vars(functional))]
    found += [_methods(kind, reach) for kind in _library_classes(model)]
    methods = [name for name in dir(torch.Tensor) if reach.reads([name])]
    found.append(_named("torch.Tensor", vars(torch.Tensor), methods))
    for module in _libraries(reach):
        found.append(_functions_in(module.__name__, vars(module), reach.names))
    return [one for one in found if one.before or one.absent]


def _functions_in(path: str, scope: Mapping[str, Any], names: Iterable[str]) -> Replaceable:
    return _named(path, scope, [name for name in names if callable(scope.get(name))])


def _named(path: str, scope: Mapping[str, Any], names: Iterable[str]) -> Replaceable:
    known, absent = (sorted(n for n in names if (n in scope) is there) for there in (True, False))
    before = {name: scope[name] for name in known}
    pick = itemgetter(*known, *known[:1]) if known else lambda _: ()  # never one: that is no tuple
    return Replaceable(path, scope, before, frozenset(absent), pick)


def _methods(kind: type, reach: Reach) -> Replaceable:
    given = (FunctionType, *SIMPLE)  # a program may give it numbers, too: nn.Linear.scale = 2.0
    names = [name for name, one in vars(kind).items() if isinstance(one, given)]
    return _named(kind.__name__, vars(kind), [one for one in names if reach.reads([one])])


def _library_classes(model: nn.Module) -> list[type]:
    """Those of the model's modules that are not the user's own, with their bases."""
    kinds = {base: None for one in model.modules() for base in type(one).__mro__}
    return [one for one in kinds if issubclass(one, nn.Module) and not is_own_class(one)]


def _libraries(reach: Reach) -> list[ModuleType]:
    held = [*_OWNERS, *(get(root.container, root.key) for root in reach.roots)]
    modules = {id(one): one for one in held if isinstance(one, ModuleType)}
    return [one for one in modules.values() if not is_own_module(one)]
