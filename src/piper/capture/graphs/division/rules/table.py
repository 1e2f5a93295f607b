"""The table of rules, and all options of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from piper.capture.graphs.division.calls import Call, Emitter, Option, shape, tensors
from piper.capture.torch_private import OpOverload
from piper.capture.trace.custom_functions import is_function
from piper.ir.placement.placements import Cut, Invariant, Partial, Placement, Replicated, divides

Options = Callable[[Call], Iterator[Option]]
Local = Callable[[Call, Option, Emitter, tuple, dict[str, Any]], fx.Node]


def same_call(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """Most operators are called by each device as they are, on what it holds."""
    return emit(call.node.target, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Rule:
    """`local` adds to a graph what one device computes, given its part of the arguments.

    `alone`: no device can compute all of it.
    """

    options: Options
    local: Local = same_call
    alone: bool = False


RULES: dict[Any, Rule] = {}


def rule(
    *operators: Any, local: Local = same_call, alone: bool = False
) -> Callable[[Options], Options]:
    """Register the options of some operators."""

    def register(options: Options) -> Options:
        RULES.update((operator, Rule(options, local, alone)) for operator in operators)
        return options

    return register


def options_of(call: Call) -> list[Option]:
    """All ways to divide a call. Whole tensors come first: that is nearly always possible."""
    known = RULES.get(call.packet)
    found = [] if known and known.alone else [*whole(call)]
    found += [_in_order(call, option) for option in (known.options(call) if known else ())]
    return list(dict.fromkeys(option for option in found if _fits(call, option)))


def _in_order(call: Call, option: Option) -> Option:
    """Rules are about pieces, whichever of them a device has."""
    if not call.zigzag:
        return option
    return Option(tuple(map(_zigzag, option.inputs)), _zigzag(option.output))


def _zigzag(placement: Placement) -> Placement:
    return replace(placement, zigzag=True) if isinstance(placement, Cut) else placement


def whole(call: Call) -> Iterator[Option]:
    """Every device computes all of it. Gradients are all whole, or all parts of a sum."""
    count = len(call.operands)
    yield Option((Invariant(),) * count, Invariant())
    if not is_users(call):
        yield Option((Replicated(),) * count, Replicated())


def is_users(call: Call) -> bool:
    """Whether the user wrote its backward. It need not be linear: it may clip gradients, or round
    them. So it must see whole gradients, never parts of a sum."""
    target = call.node.target
    if not isinstance(target, OpOverload):
        return False
    return target.namespace not in ("aten", "prims", "piper") or is_function(target)


def has_rule(call: Call) -> bool:
    return call.packet in RULES


def localized(
    call: Call, option: Option, emit: Emitter, args: tuple, kwargs: dict[str, Any]
) -> fx.Node:
    """What one device computes. `args` and `kwargs` hold its part of each tensor."""
    known = RULES.get(call.packet)
    divided = any(isinstance(p, Cut) for p in (*option.inputs, option.output))
    local = known.local if known and divided else same_call
    return local(call, option, emit, args, kwargs)


def _fits(call: Call, option: Option) -> bool:
    """Whether sizes divide evenly, and an argument that comes twice has one placement."""
    arguments = list(zip(call.operands, option.inputs, strict=True))
    if len(set(arguments)) != len(set(call.operands)) or not _keeps_parts(call, option):
        return False
    return all(_divides(node, p, call.ways) for node, p in [*arguments, (call.node, option.output)])


def _keeps_parts(call: Call, option: Option) -> bool:
    """Whether parts of a sum stay as they are: as another type, each of them would be rounded."""
    made = tensors(call.node)[0].dtype
    parts = (n for n, p in zip(call.operands, option.inputs, strict=True) if p == Partial())
    return all(torch.promote_types(tensors(node)[0].dtype, made) == made for node in parts)


def _divides(node: fx.Node, placement: Placement, ways: int) -> bool:
    if len(tensors(node)) > 1:  # the placement is that of the tensor that was split
        return divides(shape(node.all_input_nodes[0]), placement, ways)
    return divides(shape(node), placement, ways)
