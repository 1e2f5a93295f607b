"""Which code can run in a forward, and which globals it names."""

import builtins
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from logging import Logger
from operator import attrgetter, methodcaller
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from piper.capture.python_state.code_search import global_names, imported, names_in_patterns
from piper.capture.python_state.operator_code import code_of_operators
from piper.capture.python_state.ownership import (
    codes_of,
    file_of,
    is_own_class,
    is_own_function,
    is_own_module,
    is_users_class,
    is_users_function,
)
from piper.capture.python_state.places import Place, Root, Walk, get

_READ_BY_TEXT = {"getattr", "hasattr", "vars", "__dict__", "__getattribute__", "attrgetter",
                 "setattr", "delattr", "globals", "__getattr__", "eval", "exec",
                 "format", "f_globals", "__globals__"}  # fmt: skip
_DOTTED, _FIELD = re.compile(r"[A-Za-z_][\w.]*"), re.compile(r"\{\w*((?:\.\w+)+)")

_OWN_MODULE = {"modules", "import_module", "__import__", "getmodule", "f_globals", "__globals__"}

_DATA = (bool, int, float, str, list, tuple, Logger)  # of libraries: sys.argv, torch.pi


@dataclass
class Reach:
    """The user's code that a forward may run, the names in it, and where it begins to read."""

    roots: list[Root] = field(default_factory=list)
    codes: dict[CodeType, None] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)  # constants beside getattr and the like
    tensors: list[Place] = field(default_factory=list)

    def reads(self, names: Iterable[str]) -> bool:
        """Whether some code reads all of these names, directly or by a text with a part of one."""
        return all(
            name in self.names or _is_called_by_itself(name) or self._is_built(name)
            for name in names
        )

    def may_read(self, names: Iterable[str]) -> bool:
        """The same, but a text that is one of the names counts wherever it is: `kept["n"]`."""
        return all(self.reads([name]) or self._is_a_text(name) for name in names)

    def _is_a_text(self, name: str) -> bool:
        return any(name in code.co_consts for code in self.codes)

    def _is_built(self, name: str) -> bool:
        return any(text in name for text in self.texts)


def _is_called_by_itself(name: str) -> bool:
    """Methods that torch and Python call, though no code of the user names them."""
    return name in ("forward", "_call_impl") or (name.startswith("__") and name.endswith("__"))


class _Search:
    """Functions lead to globals, globals to objects, objects to classes, classes to methods."""

    def __init__(self, reach: Reach) -> None:
        self.reach, self.walk = reach, Walk()
        self.methods: dict[str, list[FunctionType]] = {}
        self.done: set[int] = set()
        self.files: set[str] = set()  # of libraries, with classes of the model's modules
        self.named: set[tuple[int, str]] = set()
        self.pending: deque[FunctionType] = deque()
        self.unseen = deque(reach.roots)

    def run(self) -> None:
        while self.unseen or self.pending:
            if self.unseen:
                self.look(self.unseen.popleft())
            else:
                self.read(self.pending.popleft())
        self.reach.tensors += self.walk.tensors

    def look(self, root: Root) -> None:
        for _ in self.walk.of([root]):
            pass
        met, self.walk.met = self.walk.met, []
        for value in met:
            self.meet(value)

    def add(self, root: Root) -> None:
        self.reach.roots.append(root)
        self.unseen.append(root)

    def meet(self, value: Any) -> None:
        match value:
            case FunctionType():
                self.enqueue(value)
            case attrgetter() | methodcaller():
                self.learn_names({part for text in _texts_of(value) for part in text.split(".")})
            case type() if is_users_function(value):
                self.files.add(file_of(value))
                self.learn(value)
            case type():
                self.learn(value)
            case nn.Module() if is_users_class(type(value)):
                self.files.add(file_of(type(value)))
                self.learn(type(value))
            case _:
                self.learn(type(value))

    def learn(self, cls: type) -> None:
        """A class that the program uses. Its methods run if some code names them."""
        all_run = is_users_function(cls)  # autograd calls backward, jvp and the like
        for base in cls.__mro__:
            followed = is_own_class(base) or file_of(base) in self.files
            if not followed and is_own_class(cls) and base not in (object, nn.Module):
                self.borrow(base)
            if id(base) in self.done or not followed:
                continue
            self.done.add(id(base))
            self.add(Root({"class": base}, "class", base.__name__, ()))
            for name, value in list(vars(base).items()):
                for function in _functions(value):
                    self.methods.setdefault(name, []).append(function)
                    if all_run or name in self.reach.names or _is_called_by_itself(name):
                        self.enqueue(function)

    def borrow(self, base: type) -> None:
        """What torch's and other code reads of the user's own objects: `p` of his `nn.Dropout`."""
        for name, value in list(vars(base).items()):
            if name in self.reach.names or _is_called_by_itself(name):
                for function in _functions(value):
                    for code in codes_of(function.__code__):
                        self.reach.names.update(code.co_names)

    def enqueue(self, function: FunctionType) -> None:
        file = function.__code__.co_filename
        if id(function) not in self.done and (is_own_function(function) or file in self.files):
            self.done.add(id(function))
            self.pending.append(function)

    def read(self, function: FunctionType) -> None:
        for code in codes_of(function.__code__):
            if code in self.reach.codes:
                continue
            self.reach.codes[code] = None
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            named = {*code.co_names, *code.co_freevars, *names_in_texts(code)}
            named |= names_in_patterns(code)
            self.reach.texts |= set(texts_in(code, 2))  # parts of names
            self.learn_names({*named, *arguments})
        for root in _globals(function):
            if (id(root.container), root.key) not in self.named:
                self.named.add((id(root.container), root.key))
                self.add(root)

    def learn_names(self, names: set[str]) -> None:
        new = names - self.reach.names
        self.reach.names |= new
        for method in (one for name in new for one in self.methods.get(name, ())):
            self.enqueue(method)


def _texts_of(getter: Any) -> list[str]:
    """What an `operator.attrgetter` or `methodcaller` that was made elsewhere asks for."""
    _, given = getter.__reduce__()[:2]
    return [one for one in given if isinstance(one, str)]


def texts_in(code: CodeType, shortest: int = 1) -> list[str]:
    """Texts by which code may read attributes and globals."""
    if _READ_BY_TEXT.isdisjoint(code.co_names):
        return []
    return [one for one in code.co_consts if isinstance(one, str) and len(one) >= shortest]


def names_in_texts(code: CodeType) -> Iterator[str]:
    """The names in them: `getattr(x, "name")`, `attrgetter("a.b")`, `"{0.name}".format(x)`."""
    for text in texts_in(code):
        if _DOTTED.fullmatch(text):
            yield from text.split(".")
        for found in _FIELD.findall(text):
            yield from found.split(".")[1:]
        if not {"eval", "exec"}.isdisjoint(code.co_names):
            with suppress(SyntaxError, ValueError):
                yield from compile(text, "<text>", "exec").co_names


def reach_of(*given: tuple[str, Any], ran: bool = True) -> Reach:
    """What can be reached from a model and a loss function, by the name of each.

    `ran`: also from operators that ran in this process.
    """
    roots = [Root({"given": value}, "given", path, ()) for path, value in given]
    reach = Reach(roots)
    search = _Search(reach)
    search.run()
    for root in code_of_operators(ran):  # last: a line of the model comes before one of theirs
        search.add(root)
    search.run()
    return reach


def _functions(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, property):
        yield from (f for f in (value.fget, value.fset) if isinstance(f, FunctionType))
    inner = (
        getattr(value, "__func__", value)
        if isinstance(value, staticmethod | classmethod)
        else value
    )
    if isinstance(inner, FunctionType):
        yield inner


def _globals(function: FunctionType) -> Iterator[Root]:
    """The globals that a function names, and what it names of the user's modules."""
    codes, scope = codes_of(function.__code__), function.__globals__
    names = sorted({name for code in codes for name in (*code.co_names, *names_in_texts(code))})
    own = {name for code in codes for name in (*global_names(code), *names_in_texts(code))}
    seen = set[int]()
    by_module = not _OWN_MODULE.isdisjoint(names)  # sys.modules[__name__].name
    for name in names if by_module else sorted(own):
        if name in scope:
            yield from _named(scope, name, name, names, seen)
        elif name in vars(builtins):
            yield Root(vars(builtins), name, name, (name,))
        elif "globals" in names:
            yield Root(scope, name, name, (name,))  # which may come later
    for name, module in _modules_inside(function, codes):
        yield from _of_module(module, name, names, seen)


def _modules_inside(
    function: FunctionType, codes: list[CodeType]
) -> Iterator[tuple[str, ModuleType]]:
    """Modules that are no globals: those of closures, and those that the function imports."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: get(cell, "cell_contents") for name, cell in cells}
    package = function.__globals__.get("__package__") or ""
    held |= {name: sys.modules[name] for name in imported(codes, package)}
    return ((name, value) for name, value in held.items() if isinstance(value, ModuleType))


def _named(
    scope: dict[str, Any], name: str, path: str, names: list[str], seen: set[int]
) -> Iterator[Root]:
    """What a name holds. Of a module, only what is named of it."""
    yield Root(scope, name, path, (name,))
    if isinstance(value := scope[name], ModuleType):
        yield from _of_module(value, path, names, seen)


def _of_module(module: ModuleType, path: str, names: list[str], seen: set[int]) -> Iterator[Root]:
    scope = vars(module)
    if is_own_module(module) and id(scope) not in seen:
        seen.add(id(scope))
        for inner in (*names, "__getattr__"):
            if inner in scope:
                yield from _named(scope, inner, f"{path}.{inner}", names, seen)
            elif "hasattr" in names or "getattr" in names:
                yield Root(scope, inner, f"{path}.{inner}", (inner,))  # which may come later
    elif not is_own_module(module):
        for inner in names:
            if isinstance(scope.get(inner), _DATA):
                yield Root(scope, inner, f"{path}.{inner}", (inner,))


def places(reach: Reach, walk: Walk | None = None) -> Iterator[Place]:
    return (walk or Walk()).of(reach.roots)
