"""`tag_layers`: find the repeated blocks of a model whose source you do not change."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from torch import nn

from piper.capture.marks.runs import EXPERTS
from piper.capture.marks.tags import has_tags, tag
from piper.capture.trace.arguments.call_arguments import split
from piper.capture.trace.module_calls import Call, Run, run_once
from piper.errors import CaptureError, Problem, first_line
from piper.names import amount

LOG = logging.getLogger("piper")
LAYER = "L"  # the tag of layers
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
MOST = 8  # names that are shown
SMALL = 4  # times as many parameters in other blocks: then lists are not the layers
BY_HAND = f'write `with piper.annotate("{LAYER}"):` around each layer, or piper.tag(model, ...)'


@dataclass(frozen=True, slots=True)
class Stack:
    """Consecutive layers of one kind from one list of modules."""

    first: int  # the number of its first layer
    paths: tuple[str, ...]
    kind: str
    parameters: int  # of all its layers

    def __str__(self) -> str:
        last = self.first + len(self.paths) - 1
        numbers = f"L={self.first}" if last == self.first else f"L={self.first} to {last}"
        ends = dict.fromkeys((self.paths[0], self.paths[-1]))
        between = " and " if len(self.paths) == 2 else " to "
        return f"{numbers}: {between.join(ends)} ({self.kind}), {self.parameters:,} parameters"


@dataclass(frozen=True, slots=True)
class Layers:
    """What `tag_layers` found, in order of execution."""

    stacks: tuple[Stack, ...]
    rest: int  # parameters outside the layers
    outside: tuple[str, ...] = ()  # the modules that these are in, and those of modules with layers

    def __len__(self) -> int:
        return sum(len(stack.paths) for stack in self.stacks)

    def __str__(self) -> str:
        first = f"{', '.join(self.outside[:MOST])}{', ...' * (len(self.outside) > MOST)}"
        rest = f"outside, joining their neighbours: {first}, {self.rest:,} parameters"
        rows = [*map(str, self.stacks), *([rest] if first else [])]
        return "\n  ".join([f"found {amount(len(self), 'layer')}", *rows])


def tag_layers(model: nn.Module, *args: Any, **kwargs: Any) -> Layers:
    """Find the layers of a model and tag them "L", in order of execution.

    `args` and `kwargs` are an example of what the model is called with; only shapes matter. The
    model runs once, on tensors without values, and stays as it is: only the paths are remembered.
    What lies before, between and behind the layers joins its neighbour. Returns what was found.
    """
    try:
        run = run_once(model, args, kwargs)
    except Exception as error:
        what = f"the model did not run on tensors without values: {first_line(error)}"
        fix = f"pass what the model is called with: tag_layers(model, tokens); or {BY_HAND}"
        raise CaptureError("tag_layers", Problem(what, fix)) from error
    if names := sorted(run.annotated - {EXPERTS}):
        what = f"the model is annotated already, with {', '.join(names)}"
        raise CaptureError("tag_layers", Problem(what, "leave out tag_layers, or the annotations"))
    return _tagged(model, _blocks_of(model, run))


def tag_unannotated(model: nn.Module, args: tuple[Any, ...]) -> Layers | None:
    """Do the same for a model without any tags, where it can be done."""
    if has_tags(model):
        return None
    try:
        run = run_once(model, *split(args))
        return None if run.annotated - {EXPERTS} else _tagged(model, _blocks_of(model, run))
    except Exception as error:  # capture will say more
        LOG.info("found no layers: %s", first_line(error))
        return None


def _tagged(model: nn.Module, blocks: Sequence[str]) -> Layers:
    tag(model, LAYER, [[path] for path in blocks])
    found = _described(model, blocks)
    LOG.info("%s", found)
    return found


def _blocks_of(model: nn.Module, run: Run) -> list[str]:
    """The paths of the layers, once for every call. Members of lists come first, unless they are
    next to nothing beside other blocks: the two products in the time embedding of a U-Net."""
    modules = dict(model.named_modules())
    listed, beside = ([call.path for call in search(run.root, modules)] for search in SEARCHES)
    large = [[path for path in found if not _is_leaf(modules[path])] for found in (listed, beside)]
    lists, others = large[0], [path for path in large[1] if path not in large[0]]
    lists, others = (found if len(found) > 1 else [] for found in (lists, others))
    if _size(others, modules) > SMALL * _size(lists, modules):
        lists = others
    if lists:
        return [*_with_equals(run.root, modules, lists)]
    for found in (listed, beside):
        if len(found) > 1:
            return found
    what = f"no module of {type(model).__name__} is a list of blocks that run one by one"
    raise CaptureError("tag_layers", Problem(what, BY_HAND))


def _size(blocks: Iterable[str], modules: dict[str, nn.Module]) -> int:
    own = {id(p): p.numel() for path in blocks for p in modules[path].parameters()}
    return sum(own.values())


def _blocks(call: Call, modules: dict[str, nn.Module]) -> Iterator[Call]:
    """The outermost members of lists. A stage that only runs a list of blocks counts as these."""
    for inner in call.inside:
        if _is_member(inner, modules) and not _is_stage(inner, modules):
            yield inner
        else:
            yield from _blocks(inner, modules)


def _with_equals(call: Call, modules: dict[str, nn.Module], blocks: list[str]) -> Iterator[str]:
    """The blocks, and modules of their class that are in no list: the middle of a U-Net."""
    kinds = {type(modules[path]) for path in blocks} - {*LISTS}
    for inner in call.inside:
        if inner.path in blocks or (
            type(modules[inner.path]) in kinds and not _contains(inner.path, blocks)
        ):
            yield inner.path
        else:
            yield from _with_equals(inner, modules, blocks)


def _contains(path: str, blocks: Iterable[str]) -> bool:
    return any(block.startswith(f"{path}.") for block in blocks)


def _siblings(call: Call, modules: dict[str, nn.Module]) -> Iterator[Call]:
    """In a model without lists: the outermost modules that run beside others of their class.

    They are attributes (`self.block1`, `self.block2`), or one block that runs several times.
    """
    own = [inner for inner in call.inside if any(True for _ in modules[inner.path].parameters())]
    classes = Counter(type(modules[inner.path]) for inner in own)
    for inner in own:
        if classes[type(modules[inner.path])] > 1:
            yield inner
        else:
            yield from _siblings(inner, modules)


SEARCHES = (_blocks, _siblings)


def _is_member(call: Call, modules: dict[str, nn.Module]) -> bool:
    """Whether a module is in a list of modules, is no list itself, and has parameters."""
    module, container = modules[call.path], modules[call.path.rpartition(".")[0]]
    if not isinstance(container, LISTS) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return any(True for _ in module.parameters())


def _is_stage(call: Call, modules: dict[str, nn.Module]) -> bool:
    """Whether a module does nothing but run a list of equal blocks, from its input to its output.

    ResNet and Swin have such stages around their blocks.
    """
    members = [inner for inner in call.inside if _is_member(inner, modules)]
    kinds = {type(modules[inner.path]) for inner in members}
    if len(kinds) != 1 or any(_is_leaf(modules[inner.path]) for inner in members):
        return False
    first, last = call.inside[0], call.inside[-1]
    chained = all(one.writes & other.reads for one, other in pairwise(call.inside))
    return chained and bool(call.reads & first.reads) and bool(last.writes & call.writes)


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _described(model: nn.Module, blocks: Sequence[str]) -> Layers:
    modules = dict(model.named_modules())
    stacks: list[Stack] = []
    kinds = groupby(blocks, key=lambda path: (path.rpartition(".")[0], type(modules[path])))
    seen: set[int] = set()
    first = 0
    for (_, kind), group in kinds:
        paths = tuple(group)
        own = {id(p): p.numel() for path in paths for p in modules[path].parameters()}
        stacks.append(Stack(first, paths, kind.__name__, sum(own.values())))
        seen |= own.keys()
        first += len(paths)
    rest = {name: p.numel() for name, p in model.named_parameters() if id(p) not in seen}
    outside = dict.fromkeys(_home(name, blocks) for name in rest)
    return Layers(tuple(stacks), sum(rest.values()), tuple(outside))


def _home(name: str, blocks: Sequence[str]) -> str:
    """The outermost module around a parameter that no layer is in.

    >>> _home("model.embed.weight", ["model.layers.0"]), _home("model.places", ["model.layers.0"])
    ('model.embed', 'model.places')
    """
    parts = name.split(".")
    paths = (".".join(parts[:k]) for k in range(1, len(parts)))
    return next((path for path in paths if not _contains(path, blocks)), name)
