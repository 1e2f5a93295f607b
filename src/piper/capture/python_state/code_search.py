"""Where code stores a name, and whether it reads it for anything but to count on."""

import dis
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType

from piper.capture.source_lines import short_line

_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME", "DELETE_ATTR"}
_LOADS = {"LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "LOAD_METHOD", "LOAD_CLASSDEREF"}
_GLOBALS = frozenset({
    "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME", "DELETE_NAME",
    "LOAD_FROM_DICT_OR_GLOBALS",
})  # fmt: skip
_PATTERNS = {"MATCH_CLASS", "MATCH_KEYS"}
_IMPORTS = {"modules", "import_module", "__import__"}
# What may stand between the load and the store of a counter:
_COUNTING = {"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "BINARY_OP", "SWAP", "COPY"}


def line_that_changes(name: str, codes: Iterable[CodeType]) -> str:
    """The line that stores a name, or else one that reads it, to change what it holds.

    Or else one with its text: `vars(self)["name"]`.
    """
    known = [
        code
        for code in codes
        if (name in _names(code) or name in code.co_consts) and code.co_name != "__init__"
    ]
    for wanted in (_STORES, _LOADS, {"LOAD_FAST"}, {"LOAD_CONST"}):
        for code in known:
            for instruction, line in _instructions(code):
                if instruction.opname in wanted and instruction.argval == name:
                    return short_line(code.co_filename, line)
    return ""


def only_counts(name: str, codes: Iterable[CodeType]) -> bool:
    """Whether code reads a name only to add a constant to it, as in `self.count += 1`."""
    return all(
        _is_counted(name, [one for one, _ in _instructions(code)])
        for code in codes
        if name in _names(code) and code.co_name != "__init__"
    )


@cache
def global_names(code: CodeType) -> frozenset[str]:
    """What code names as globals, not as attributes of something."""
    found = (one.argval for one in dis.get_instructions(code) if one.opname in _GLOBALS)
    return frozenset(found)


@cache
def names_in_patterns(code: CodeType) -> frozenset[str]:
    """Attributes and keys in patterns: `case Namespace(scale=x)`, `case {"scale": x}`."""
    if not any(one.opname in _PATTERNS for one in dis.get_instructions(code)):
        return frozenset()
    tuples = [one for one in code.co_consts if isinstance(one, tuple)]
    return frozenset(one for inner in tuples for one in inner if isinstance(one, str))


def imported(codes: Iterable[CodeType], package: str) -> list[str]:
    """The modules that code in a package imports itself, or asks for by name."""
    parts = package.split(".")
    above = [".".join(parts[:count]) for count in range(len(parts), 0, -1) if package]
    found: dict[str, None] = {}
    for code in codes:
        by_text = not _IMPORTS.isdisjoint(code.co_names)
        asked = [one for one in code.co_consts if by_text and isinstance(one, str)]
        for name in (*code.co_names, *asked):  # `from . import x` has an empty name
            for one in (name, *(f"{start}.{name}".rstrip(".") for start in above)):
                if one in sys.modules:
                    found[one] = None
    return list(found)


def _is_counted(name: str, code: list[dis.Instruction]) -> bool:
    for index, instruction in enumerate(code):
        if instruction.opname in _LOADS and instruction.argval == name:
            rest = (one for one in code[index + 1 :] if one.opname not in _COUNTING)
            end = next(rest, None)
            if end is None or end.opname not in _STORES or end.argval != name:
                return False
    return True


def _names(code: CodeType) -> set[str]:
    return {*code.co_names, *code.co_freevars, *code.co_cellvars, *code.co_varnames}


def _instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = (instruction.positions and instruction.positions.lineno) or line
        yield instruction, line
