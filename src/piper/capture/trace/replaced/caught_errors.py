"""Errors that only values decide, which a forward catches: a trace has no values, and no errors.

`try: torch.linalg.cholesky(k)`, `except RuntimeError: ...`: a captured step would take the first
way in each step.
"""

from __future__ import annotations

import ast
import builtins
import linecache
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from piper.capture.function_refusals import caught_error
from piper.capture.source_lines import frames_of_model, short_line
from piper.capture.unvalued_errors import explained

RAISING = frozenset({  # functions of torch that look at values
    "linalg_cholesky", "cholesky", "linalg_inv", "inverse", "linalg_solve", "linalg_lu_factor",
    "lu", "linalg_lu", "linalg_ldl_factor", "linalg_eigh", "linalg_eigvalsh", "linalg_eig",
    "linalg_eigvals", "linalg_svd", "linalg_svdvals", "svd", "linalg_pinv", "pinverse",
    "linalg_lstsq", "linalg_tensorinv", "linalg_tensorsolve", "linalg_matrix_power",
    "cholesky_solve", "cholesky_inverse", "embedding", "embedding_bag", "index_select", "gather",
    "take", "take_along_dim", "index_add", "index_add_", "index_copy", "index_copy_", "index_put",
    "index_put_", "scatter", "scatter_", "scatter_add", "scatter_add_", "__getitem__",
    "__setitem__", "one_hot", "nll_loss", "cross_entropy", "binary_cross_entropy", "ctc_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multinomial", "bernoulli", "bernoulli_",
    "normal", "poisson", "binomial", "bincount", "_assert_async",
})  # fmt: skip
ERRORS = (torch.linalg.LinAlgError, IndexError, ValueError)  # the first is a RuntimeError
WITH_INDEX = ("__getitem__", "__setitem__")

Errors = tuple[type[Exception], ...]


def refuse_caught(name: str, args: Any) -> None:
    """An error if the code that calls such a function would catch what it raises."""
    if name not in RAISING or (name in WITH_INDEX and not is_index(args[1])):
        return
    if (where := line_that_catches(ERRORS)) is not None:
        raise caught_error(where, name.strip("_"))


@contextmanager
def refusing_swallowed(kinds: Errors) -> Iterator[None]:
    """What only a trace raises, such as about values, must not be caught by the model."""
    found = list[Exception]()

    def note(error: Exception) -> None:
        if line_that_catches((type(error),)) is not None:
            found.append(error)

    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(_made(kind, note))
        yield
    for error in found:
        raise explained(error) or error


@contextmanager
def _made(kind: Any, note: Callable[[Exception], None]) -> Iterator[None]:
    """While this is open, each new error of a class is told."""
    own, original = vars(kind).get("__init__"), kind.__init__

    def init(self: Exception, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        note(self)

    kind.__init__ = init
    try:
        yield
    finally:
        if own is None:
            del kind.__init__
        else:
            kind.__init__ = own


def line_that_catches(errors: Errors) -> str | None:
    """Of the model, as far as it runs now."""
    for frame in frames_of_model():
        file, line, begins = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_firstlineno
        for first, last, handlers in attempts(file):
            if not begins < first <= line <= last:  # a function that begins in it is called later
                continue
            if any(catches(one, frame, errors) for one in handlers):
                return short_line(file, line)
    return None


def is_index(given: Any) -> bool:
    every = given if isinstance(given, tuple) else (given,)
    return any(isinstance(one, torch.Tensor) and one.dtype is not torch.bool for one in every)


Attempt = tuple[int, int, tuple[ast.expr | None, ...]]  # lines, and what is caught; None: all


@lru_cache(256)
def attempts(file: str) -> tuple[Attempt, ...]:
    """The parts of a file whose errors are caught, if its text is known."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(found for node in ast.walk(tree) for found in attempt_of(node))


def attempt_of(node: ast.AST) -> Iterator[Attempt]:
    match node:
        case ast.Try(body=[first, *_] as body, handlers=handlers):
            caught = tuple(one.type for one in handlers if not isinstance(one.body[-1], ast.Raise))
            yield first.lineno, body[-1].end_lineno or 0, caught
        case ast.With(items=items, body=[first, *_] as body):
            calls = [one.context_expr for one in items if isinstance(one.context_expr, ast.Call)]
            caught = tuple(kind for one in calls if is_suppress(one.func) for kind in one.args)
            yield first.lineno, body[-1].end_lineno or 0, caught


def is_suppress(function: ast.expr) -> bool:
    match function:
        case ast.Name(id="suppress") | ast.Attribute(attr="suppress"):
            return True
    return False


def catches(wanted: ast.expr | None, frame: FrameType, errors: Errors) -> bool:
    """Whether it names a class of such errors, as far as the names of a function say it."""
    if wanted is None:
        return True
    if isinstance(wanted, ast.Tuple):
        return any(catches(one, frame, errors) for one in wanted.elts)
    found = named(wanted, frame)
    kinds = found if isinstance(found, tuple) else (found,)
    return any(not isinstance(one, type) or have_a(errors, one) for one in kinds)


def have_a(errors: Errors, kind: type) -> bool:
    return any(issubclass(error, kind) for error in errors)


def named(expression: ast.expr, frame: FrameType) -> Any:
    """None: only running it would tell."""
    match expression:
        case ast.Name(id=name):
            scopes = (frame.f_locals, frame.f_globals, vars(builtins))
            return next((scope[name] for scope in scopes if name in scope), None)
        case ast.Attribute(value=value, attr=name):
            return getattr(named(value, frame), name, None)
    return None
