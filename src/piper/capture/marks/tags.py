"""`tag`: regions by the paths of modules, for a model whose source you do not change."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from difflib import get_close_matches
from itertools import cycle
from typing import Any

from torch import nn

from piper.capture.marks.annotate import annotate
from piper.errors import CaptureError, Problem

_TABLE = "_piper_tags"  # an attribute of the model, so that copies of the model keep it


def tag(model: nn.Module, name: str, groups: Sequence[Sequence[str]]) -> None:
    """Make each group of modules a region of its own: groups[i] is `name`=i.

    If a module is called several times and is in several groups, its calls go to these in turn.
    Only remembers the paths: the model runs as before, and `capture` looks them up.
    """
    if isinstance(groups, str) or any(isinstance(group, str) for group in groups):
        paths = [groups] if isinstance(groups, str) else groups
        text = f'[["{next(one for one in paths if isinstance(one, str))}"], ...]'
        what, fix = "a group is a list of paths of modules, and not one path", f"write {text}"
        raise CaptureError.of(f'tag("{name}")', what, fix)
    known = [path for path, _ in model.named_modules() if path]
    unknown = [path for group in groups for path in group if path not in known]
    if unknown:
        raise CaptureError(f'tag("{name}")', *(_unknown(path, known) for path in unknown))
    table = {**getattr(model, _TABLE, {}), name: [list(group) for group in groups]}
    setattr(model, _TABLE, table)


def untag(model: nn.Module, name: str) -> None:
    """Forget the groups of this name."""
    table = getattr(model, _TABLE, {})
    setattr(model, _TABLE, {other: groups for other, groups in table.items() if other != name})


@contextmanager
def tagging(model: nn.Module) -> Iterator[None]:
    """While this is open, tagged modules of `model` open and close their regions."""
    with ExitStack() as stack:
        for name, groups in getattr(model, _TABLE, {}).items():
            indices: dict[str, list[int]] = {}
            for index, group in enumerate(groups):
                for path in group:
                    indices.setdefault(path, []).append(index)
            for path, own in indices.items():
                stack.enter_context(_hooked(model.get_submodule(path), name, own))
        yield


def has_tags(model: nn.Module) -> bool:
    return bool(getattr(model, _TABLE, {}))


@contextmanager
def _hooked(module: nn.Module, name: str, indices: Sequence[int]) -> Iterator[None]:
    """Each call is a region: the next one of these, and then the first one again."""
    entered: list[AbstractContextManager[None]] = []
    numbers = cycle(indices)

    def open_region(*_: Any) -> None:
        region = annotate(name, next(numbers))
        region.__enter__()
        entered.append(region)

    def close_region(*_: Any) -> None:
        if entered:  # empty if entering it raised an error
            entered.pop().__exit__(None, None, None)

    before = module.register_forward_pre_hook(open_region, prepend=True)
    after = module.register_forward_hook(close_region, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _unknown(path: str, known: list[str]) -> Problem:
    near = get_close_matches(path, known, n=3, cutoff=0.5) or known[:3]
    return Problem(f"the model has no module {path}", f"use one of {', '.join(near)}")
