"""The arguments of a model as one tuple, and the loss in what it returns."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor

from piper.capture.torch_private import pytree

LABELS = "labels"  # the keyword argument that a loss function gets


class Keywords(dict[str, Any]):
    """Keyword arguments. They come first in a tuple of arguments, so that labels stay last.

    `labelled`: the last argument was also given by keyword, as `labels`.
    """

    def __init__(self, given: Mapping[str, Any], labelled: bool = False) -> None:
        super().__init__(given)
        self.labelled = labelled


def split(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model.

    >>> split((Keywords({"mask": 1}), 2, 3)), split((2, 3))
    (((2, 3), {'mask': 1}), ((2, 3), {}))
    """
    if arguments and isinstance(arguments[0], Keywords):
        return arguments[1:], dict(arguments[0])
    return arguments, {}


def as_given(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same, but with labels by keyword if they were given so.

    >>> as_given((Keywords({"mask": 1}, labelled=True), 3))
    ((), {'mask': 1, 'labels': 3})
    """
    positional, named = split(arguments)
    if arguments and isinstance(arguments[0], Keywords) and arguments[0].labelled:
        return positional[:-1], {**named, LABELS: positional[-1]}
    return positional, named


def call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    positional, named = split(arguments)
    return function(*positional, **named)


def own_loss(output: Any) -> Any:
    """The loss in the output of a model that computes it: the output, or its entry `loss`."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss", output)
    return getattr(output, "loss", output)


def flatten(arguments: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and nesting, also of mappings that PyTorch does not know, such as BatchEncoding, and
    of dataclasses."""
    leaves, spec = pytree.tree_flatten(arguments)
    unknown = {type(leaf) for leaf in leaves if isinstance(leaf, Mapping)}
    plain = {type(leaf) for leaf in leaves if _is_plain_dataclass(leaf)} - unknown
    if not unknown | plain:
        return leaves, spec
    for kind in unknown:
        pytree.register_pytree_node(kind, _entries, _maker(kind))
    for kind in plain:
        pytree.register_pytree_node(kind, _fields, partial(_dataclass, kind))
    return flatten(arguments)


def _is_plain_dataclass(leaf: Any) -> bool:
    """With tensors in its fields, and no other attributes."""
    if not is_dataclass(leaf) or isinstance(leaf, type | Tensor):
        return False
    values, names = _fields(leaf)
    alone = set(getattr(leaf, "__dict__", names)) == set(names)
    return alone and any(isinstance(one, Tensor) for one in flatten(values)[0])


def _fields(found: Any) -> tuple[list[Any], tuple[str, ...]]:
    names = tuple(one.name for one in fields(found))
    return [getattr(found, name) for name in names], names


def _dataclass(kind: type, values: Iterable[Any], names: tuple[str, ...]) -> Any:
    """Frozen ones, too, and without what `__post_init__` would do again."""
    made: Any = object.__new__(kind)
    for name, one in zip(names, values, strict=True):
        object.__setattr__(made, name, one)
    return made


def _entries(mapping: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
    return list(mapping.values()), list(mapping)


def _maker(kind: Any) -> Callable[[Iterable[Any], list[str]], Any]:
    return lambda values, names: kind(dict(zip(names, values, strict=True)))


def _named(keywords: Keywords) -> tuple[list[Any], tuple[tuple[str, ...], bool]]:
    return list(keywords.values()), (tuple(keywords), keywords.labelled)


def _keywords(values: Iterable[Any], context: tuple[tuple[str, ...], bool]) -> Keywords:
    names, labelled = context
    return Keywords(dict(zip(names, values, strict=True)), labelled)


pytree.register_pytree_node(Keywords, _named, _keywords)
