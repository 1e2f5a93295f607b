"""Files whose tensors are not those of the model: transformers says how they belong together.

The hub has a matrix for every expert, for example, and the model one tensor for all experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from piper.errors import InputError
from piper.models.transformers_private import (
    conversions_of,
    converters_of,
    in_natural_order,
    name_in_model,
    reverted,
    unread_names,
)
from piper.models.weight_boxes import Boxed, Shape, divided, joined, of_file, stacked

Shapes = Mapping[str, Shape]
State = dict[str, list[Boxed]]  # tensors by a pattern of their names


@dataclass
class Conversion:
    """Of the files of one model. It remembers what was used, which `save_pretrained` undoes."""

    model: nn.Module
    used: list[Any] | None = None  # None: no files were read

    def read(self, shapes: Shapes) -> dict[str, Boxed]:
        """The tensors of the model, made of those in files. What it does not need is left out."""
        conversions = conversions_of(self.model)
        found = arranged(self.model, conversions, shapes)
        self.used = [one for one in conversions if one.was_used()]
        return found

    def written(self, shapes: Shapes) -> tuple[Shapes, dict[str, Boxed]]:
        """What transformers would write for the tensors of a model, and these made of that."""
        meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        files = reverted(self.model, self.used, meta)
        there = {name: tuple(one.shape) for name, one in files.items()}
        return there, arranged(self.model, conversions_of(self.model), there)


@dataclass
class Group:
    """Tensors of files that one converter takes together."""

    converter: Any
    members: dict[str, list[str]] = field(default_factory=dict)  # names, by pattern


def arranged(model: Any, conversions: list[Any], shapes: Shapes) -> dict[str, Boxed]:
    known = model.state_dict()
    by_pattern = {p: one for one in converters_of(conversions)[1] for p in one.source_patterns}
    unread = [re.compile(one) for one in unread_names(model)]
    found, groups = dict[str, Boxed](), dict[str, Group]()
    for name in in_natural_order(shapes):
        target, pattern = name_in_model(name, conversions, model.base_model_prefix, known)
        if target in known and pattern is not None:
            group = groups.setdefault(target, Group(by_pattern[pattern]))
            group.members.setdefault(pattern, []).append(name)
        elif target in known and target not in found:
            found[target] = of_file(name, shapes[name])
        elif not any(one.search(target) for one in unread):
            found[name] = of_file(name, shapes[name])  # the model does not know it
    for target, group in groups.items():
        found |= converted(target, group, shapes, known)
    return found


def converted(target: str, group: Group, shapes: Shapes, known: Mapping[str, Any]) -> Any:
    state: State = {
        pattern: [of_file(name, shapes[name]) for name in names]
        for pattern, names in group.members.items()
    }
    for operation in group.converter.operations:
        state = applied(operation, state, group.converter, tuple(known[target].shape))
    first = group.converter.target_patterns[0]
    return {target.replace(first, key, 1): one for key, [one] in state.items()}


def applied(operation: Any, state: State, converter: Any, wanted: Shape) -> State:
    """What an operation of transformers gives."""
    targets: Sequence[str] = converter.target_patterns
    values = [one for pattern in converter.source_patterns for one in state.get(pattern, ())]
    values = values or [one for each in state.values() for one in each]
    match type(operation).__name__:
        case "MergeModulelist" if len(state) > 1 or len(targets) == 1:
            keys = [*state] if len(state) > 1 else [targets[0]]
            merged = ([stacked(each, operation.dim)] for each in state.values())
            return dict(zip(keys, merged, strict=True))
        case "Concatenate" if len(targets) == 1:
            return {targets[0]: [joined(values, operation.dim)]}
        case "Chunk" if is_divisible(operation, values, len(targets)):
            parts = divided(values[0], len(targets), operation.dim)
            return {key: [one] for key, one in zip(targets, parts, strict=True)}
        case "Transpose" if operation.check_dims and [one.shape for one in values] == [wanted]:
            return {targets[0]: values}
        case other:
            raise unreadable(other, values[0].boxes[0].source)


def is_divisible(operation: Any, values: Sequence[Boxed], parts: int) -> bool:
    fixed = getattr(operation, "num_shards_attribute", None) is None
    return fixed and len(values) == 1 and values[0].shape[operation.dim] % parts == 0


def unreadable(operation: str, name: str) -> InputError:
    return InputError.of(
        "from_pretrained",
        f"transformers computes the model's weights from {name} by {operation}, which Piper does "
        "not do",
        "load the model with transformers, and give it to piper.Trainer(model, None, strategy, "
        "example=batch)",
    )
