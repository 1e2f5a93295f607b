"""Whether a text that code makes is only printed, as far as its source tells."""

import ast
import linecache
import re
from functools import cache
from itertools import islice
from types import FrameType

from piper.capture.source_lines import is_capture, is_users

_PRINTING = re.compile(
    r"(\w*_)?(p?print|log|debug|info|warn|warning|error|critical|exception|write|echo|description"
    r"|postfix)(_\w*)?"
)
_OF_TEXTS = re.compile(r"str|repr|format|join|[lr]?strip|[lr]just|center|upper|lower|zfill|replace")
_AROUND = (ast.JoinedStr, ast.FormattedValue, ast.Tuple, ast.Dict, ast.keyword, ast.GeneratorExp,
           ast.ListComp)  # fmt: skip
_PASSED = ("__torch_function__", "__torch_dispatch__")

Span = tuple[int | None, ...]  # first and last line, first and last column


def is_printed(frame: FrameType | None) -> bool:
    """Of the text that a frame makes now, or that a function which it has called returns."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if is_capture(frame.f_code.co_filename) and frame.f_code.co_name not in _PASSED:
            return False  # the model returns it
        frame = frame.f_back
    if frame is None:
        return False
    source = source_of(frame.f_code.co_filename)
    node = None if source is None else source.at(_span(frame))
    if source is None or node is None:  # typed in at a prompt
        return any(map(_PRINTING.fullmatch, frame.f_code.co_names))
    answer = source.prints(node)
    return is_printed(frame.f_back) if answer is None else answer


def _span(frame: FrameType) -> Span:
    return next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))


@cache
def source_of(file: str) -> "Source | None":
    try:
        return Source(ast.parse("".join(linecache.getlines(file))))
    except SyntaxError:
        return None


class Source:
    """The code of a file, with what each expression is part of."""

    def __init__(self, tree: ast.AST) -> None:
        self.above = {
            inner: node for node in ast.walk(tree) for inner in ast.iter_child_nodes(node)
        }

    def at(self, span: Span) -> ast.AST | None:
        """The outermost expression that is computed there."""
        found = (node for node in self.above if isinstance(node, ast.expr))
        return next((node for node in found if _span_of(node) == span), None)

    def prints(self, node: ast.AST, known: frozenset[str] = frozenset()) -> bool | None:
        """Whether a text is printed, or thrown away. None: it is returned."""
        if isinstance(node, ast.Call) and self.is_print(node):
            return True
        while (part := node) in self.above:
            match node := self.above[node]:
                case ast.Return() | ast.Lambda():
                    return None
                case ast.Raise() | ast.Expr():
                    return True
                case ast.Assert():
                    return part is node.msg
                case ast.Call() if self.is_print(node):
                    return True
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AugAssign(target=ast.Name(id=name))
                ):
                    return name in known or self.are_printed(name, node, known | {name})
                case _ if not _is_around(node):
                    return False
        return False

    def is_print(self, call: ast.Call) -> bool:
        """What it returns is not used, and its name says what it does."""
        above = self.above.get(call)
        while isinstance(above, ast.IfExp | ast.BoolOp):  # `verbose and print(...)`
            above = self.above.get(above)
        return isinstance(above, ast.Expr) and bool(_PRINTING.fullmatch(_name(call.func)))

    def are_printed(self, name: str, node: ast.AST, known: frozenset[str]) -> bool | None:
        """All that is read of a variable, in the function where a statement sets it."""
        while node in self.above and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node = self.above[node]
        reads = [
            one
            for one in ast.walk(node)
            if isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Load)
        ]
        found = [self.prints(one, known) for one in reads]
        return None if None in found and False not in found else all(found)


def _is_around(node: ast.AST) -> bool:
    """Whether it makes a text, or a few values, of the texts inside."""
    match node:
        case ast.Call(func=function):
            return _is_around(function)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _OF_TEXTS.fullmatch(name) is not None
        case ast.BinOp(op=ast.Add() | ast.Mod()):
            return True
    return isinstance(node, _AROUND)


def _name(function: ast.AST) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _span_of(node: ast.AST) -> Span:
    fields = ("lineno", "end_lineno", "col_offset", "end_col_offset")
    return tuple(getattr(node, field, None) for field in fields)
