"""Errors of the user's script: where in their own code, and what."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType

PIPER = str(Path(__file__).parents[1])
HIDDEN = ("<frozen", "<string>", "runpy.py")  # `<string>`: methods that a dataclass generates
NO_BACKWARD = "leave it out: a step of the Trainer includes the backward and the optimizer's step"
DONE = ("float", "Metrics", "Evaluation")  # what `step` or `evaluate` returned, or its loss
NO_ENTRIES = "'Evaluation' object is not subscriptable"
NO_TENSOR = ("item", "detach", "cpu", "mean", "numpy", "tolist")  # the loss is a number
SUGGESTS = sys.version_info >= (3, 12)  # tracebacks suggest names by themselves
ALIKE = 0.8  # of difflib: `los` is 0.86 like `loss`
OF_PROCESSES = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
})  # fmt: skip
NO_PROCESSES = (
    "only `piper run -n 2` and torchrun start processes; elsewhere, this variable is not set. "
    "Leave it out: the Trainer chooses the device of its process, and has trainer.rank and "
    "trainer.replica"
)
LIBRARY = sysconfig.get_paths()["stdlib"]  # of Python, also from a virtual environment
INSTALLED = ("site-packages", "dist-packages", str(Path(sys.prefix) / "lib"), LIBRARY)


def shortened(error: BaseException) -> str:
    """A traceback of the user's own lines, and of the line that failed, wherever it is.

    Piper and installed libraries stay out of it, but for the last line.
    """
    whole = traceback.TracebackException.from_exception(error)
    for one in chain_of(whole):
        last = len(one.stack) - 1
        kept = [row for k, row in enumerate(one.stack) if k == last or is_own(row.filename)]
        one.stack = traceback.StackSummary.from_list(kept)
    return "".join(whole.format()).rstrip("\n") + hint(error)


def own_frames(found: TracebackType | None) -> TracebackType | None:
    """The user's own part of a traceback."""
    if found is None:
        return None
    rest = own_frames(found.tb_next)
    if not is_own(found.tb_frame.f_code.co_filename):
        return rest
    return TracebackType(rest, found.tb_frame, found.tb_lasti, found.tb_lineno)


def hint(error: BaseException) -> str:
    """What to write instead, below an error of Python's own that newcomers often make.

    >>> hint(AttributeError("...", name="backward", obj=2.5))
    "\\n  fix: leave it out: a step of the Trainer includes the backward and the optimizer's step"
    >>> print(hint(KeyError("LOCAL_RANK"))[:64])
    <BLANKLINE>
      fix: only `piper run -n 2` and torchrun start processes; else
    """
    match error:
        case AttributeError(name="backward", obj=obj) if is_done(obj):
            return f"\n  fix: {NO_BACKWARD}"
        case AttributeError(name=str() as name, obj=float()) if name in NO_TENSOR:
            return f"\n  fix: leave out .{name}(): it is a number of Python already"
        case AttributeError(name=str() as name, obj=obj) if name in NO_TENSOR and is_done(obj):
            return "\n  fix: write .loss, which is a number of Python"
        case KeyError(args=[str() as name]) if name in OF_PROCESSES:
            return f"\n  fix: {NO_PROCESSES}"
        case TypeError(args=[str() as text]) if text == NO_ENTRIES:
            return "\n  fix: write .loss, or .perplexity: they are attributes"
        case TypeError(args=[str() as text]) if text.startswith("Trainer.evaluate()"):
            return "\n  fix: it takes batches: write trainer.evaluate([(x, y)])"
        case AttributeError(name=str() as name) if not SUGGESTS:
            near = get_close_matches(name, dir(error.obj), 1, ALIKE)
        case NameError(name=str() as name) if not SUGGESTS:
            near = get_close_matches(name, visible(error), 1, ALIKE)
        case _:
            near = []
    return f". Did you mean: {near[0]!r}?" if near else ""


def is_done(found: object) -> bool:
    return type(found).__name__ in DONE


def visible(error: BaseException) -> list[str]:
    """The names where an error came up."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [*frames[-1].f_locals, *frames[-1].f_globals] if frames else []


def line_of(error: BaseException) -> str:
    """Where in the user's own code an error came up, as a line below it; empty if nowhere."""
    rows = traceback.extract_tb(error.__traceback__)
    own = [row for row in rows if is_own(row.filename)]
    if not own:
        return ""
    line = f": {own[-1].line}" if own[-1].line else ""  # that of a notebook's cell is in no file
    return f"\n  at {own[-1].filename}:{own[-1].lineno}{line}"


def chain_of(whole: traceback.TracebackException) -> list[traceback.TracebackException]:
    """An error, and those that it came from."""
    found: list[traceback.TracebackException] = []
    one: traceback.TracebackException | None = whole
    while one is not None:
        found.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return found


def is_own(file: str) -> bool:
    others = (PIPER, *HIDDEN, *INSTALLED)
    return not any(part in file for part in others)
