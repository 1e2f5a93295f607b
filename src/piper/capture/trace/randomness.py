"""Random operations of a model become reproducible: their numbers depend on seed and position."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from piper.capture import refusals
from piper.capture.fx_nodes import arguments, insert, is_contiguous, line, same_layout, value
from piper.capture.kernels import random_operators as ops
from piper.capture.kernels.dropout import DROPOUT
from piper.capture.trace.decisions.shared_draws import ONCE, ROW, ROWS, is_random
from piper.capture.trace.forward import Traced
from piper.names import amount

LOG = logging.getLogger("piper")
aten = torch.ops.aten
Given = dict[str, Any]  # arguments of an operator of torch, by name
Made = tuple[Any, Any, tuple[Any, ...]]  # Piper's operator, what it is like, its other arguments
Translation = Callable[[fx.Node, Given], Made | None]  # None: it is not random after all


def make_reproducible(traced: Traced) -> None:
    """Number the random operations of the model and let each read `traced.random`."""
    numbers, apart = Numbers(), 0
    for node in list(traced.root.graph.nodes):
        if node.target is ATTENTION and not is_random(node):
            continue
        if node.target in TRANSLATIONS:
            apart += node.target is ATTENTION
            _replace(traced, node, numbers)
        elif is_random(node):
            raise refusals.random_operation(node)
    if apart:
        LOG.info(
            "dropout in %s: attention probabilities are computed as tensors, which need memory for "
            "every pair of tokens; set the dropout of attention to 0 to avoid it",
            amount(apart, "attention"),
        )


class Numbers:
    """Of random operations. A loop over rows has one, however many rows there are."""

    def __init__(self) -> None:
        self.count, self.loops = 0, dict[str, int]()

    def next(self, node: fx.Node) -> int:
        _, _, loop = node.meta.get(ROW, (0, 0, ""))
        found = self.loops.get(loop, self.count) if loop else self.count
        self.count += found == self.count
        if loop:
            self.loops[loop] = found
        return found


def _replace(traced: Traced, node: fx.Node, numbers: Numbers) -> None:
    """Put Piper's operator in place of torch's, if it is random after all."""
    given = arguments(node)
    if given.get("generator") is not None:
        raise refusals.own_generator(line(node))
    made = TRANSLATIONS[node.target](node, given)
    if made is None:
        result = given.get("input", given.get("self"))
    else:
        target, like, rest = made
        with traced.root.graph.inserting_before(node):
            random, rows = _random_of(traced, node)
            passed = (random if like is None else like, random, numbers.next(node), *rest, *rows)
            drawn = traced.root.graph.call_function(target, passed)
            drawn.meta = node.meta
            result = _laid_out(traced.root.graph, node, drawn)
    if result is not node:
        node.replace_all_uses_with(result)
        traced.root.graph.erase_node(node)


def _laid_out(graph: fx.Graph, node: fx.Node, drawn: fx.Node) -> fx.Node:
    """Numbers like a transposed tensor lie in memory as it does: a view of them relies on it."""
    wanted = value(node)
    if is_contiguous(wanted):
        return drawn
    found = drawn.target(*fx.map_arg(drawn.args, value))
    if same_layout(found, wanted):
        return drawn
    drawn.meta = {**node.meta, "val": found}
    order = sorted(range(wanted.dim()), key=wanted.stride, reverse=True)
    back = [order.index(dim) for dim in range(wanted.dim())]
    turned = insert(graph, node, aten.permute.default, drawn, order)
    dense = insert(graph, node, aten.clone.default, turned, memory_format=torch.contiguous_format)
    return insert(graph, node, aten.permute.default, dense, back)


def _random_of(traced: Traced, node: fx.Node) -> tuple[fx.Node, list[list[int]]]:
    """The seed for an operation, and where it has rows, if that is not the first dimension."""
    random, rows = _random(traced), node.meta.get(ROWS)
    together = rows and rows[0] > 1 and node.target in CHANNELS  # each channel has all rows
    if node.meta.get(ONCE) or together:
        return insert(traced.root.graph, node, ops.ONCE, random), []
    if node.meta.get(ROW):
        row, count, _ = node.meta[ROW]
        return insert(traced.root.graph, node, ops.OF_ROW, random, row, count), []
    return random, [list(rows)] if rows else []


# How operators of torch are written with Piper's


def _dropout(target: Any, *rest: Any) -> Translation:
    def translated(node: fx.Node, given: Given) -> Made | None:
        active = bool(given["train"]) and given["p"] > 0
        return (target, given["input"], (given["p"], *rest)) if active else None

    return translated


def _sized(target: Any) -> Translation:
    """A tensor of the size and type that the trace saw."""
    return lambda node, given: (target, None, (list(value(node).shape), value(node).dtype))


def _sized_like(target: Any, otherwise: Any, *rest: float) -> Translation:
    """The same; or like a tensor whose size is known only when the graph runs: `x[mask]`."""

    def translated(node: fx.Node, given: Given) -> Made | None:
        if _has_size(node):
            return _sized(target)(node, given)
        return otherwise, _in_type(node, given["self"]), rest

    return translated


def _has_size(node: fx.Node) -> bool:
    return all(isinstance(size, int) for size in value(node).shape)


def _in_type(node: fx.Node, like: fx.Node) -> fx.Node:
    """What a tensor is drawn like, in the type that it has itself."""
    if value(like).dtype == value(node).dtype:
        return like
    with node.graph.inserting_before(node):
        return insert(node.graph, node, aten.to.dtype, like, value(node).dtype)


def _integers(node: fx.Node, given: Given) -> Made:
    if not _has_size(node):
        raise refusals.refusal(
            line(node),
            "it draws integers for a tensor whose size depends on values",
            "use (torch.rand_like(x) * high).floor(), or draw them for all rows and select after",
        )
    size = list(value(node).shape)
    return ops.RANDINT, None, (given.get("low", 0), given["high"], size, value(node).dtype)


def _permutation(node: fx.Node, given: Given) -> Made:
    return ops.RANDPERM, None, (given["n"], value(node).dtype)


def _like(target: Any, *names: str) -> Translation:
    """In place of the values of a tensor, with some of the arguments."""
    return lambda node, given: (target, given["self"], tuple(given[name] for name in names))


def _leaky(node: fx.Node, given: Given) -> Made | None:
    lower, upper = given["lower"], given["upper"]
    if not given["training"]:
        lower = upper = (lower + upper) / 2
    return ops.LEAKY, given["self"], (lower, upper)


def _attention(node: fx.Node, given: Given) -> Made:
    names = ("key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    return ops.ATTENTION, given["query"], tuple(given[name] for name in names)


CHANNELS = (aten.feature_dropout.default, aten.feature_alpha_dropout.default)
ATTENTION = aten.scaled_dot_product_attention.default
TRANSLATIONS: dict[Any, Translation] = {
    aten.dropout.default: _dropout(DROPOUT),
    aten.feature_dropout.default: _dropout(ops.FEATURE_DROPOUT),
    aten.alpha_dropout.default: _dropout(ops.ALPHA_DROPOUT, False),
    aten.feature_alpha_dropout.default: _dropout(ops.ALPHA_DROPOUT, True),
    aten.rand.default: _sized(ops.RAND),
    aten.rand_like.default: _sized_like(ops.RAND, ops.BETWEEN, 0.0, 1.0),
    aten.randn.default: _sized(ops.RANDN),
    aten.randn_like.default: _sized_like(ops.RANDN, ops.NORMAL_LIKE, 0.0, 1.0),
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.randint_like.default: _integers,
    aten.randint_like.low_dtype: _integers,
    aten.randperm.default: _permutation,
    aten.bernoulli.default: _like(ops.BERNOULLI),
    aten.bernoulli.p: _like(ops.COIN, "p"),
    aten.uniform.default: _like(ops.BETWEEN, "from", "to"),
    aten.normal_functional.default: _like(ops.NORMAL_LIKE, "mean", "std"),
    aten.exponential.default: _like(ops.EXPONENTIAL, "lambd"),
    aten.multinomial.default: _like(ops.MULTINOMIAL, "num_samples", "replacement"),
    aten.rrelu.default: _leaky,
    ATTENTION: _attention,
}


def _random(traced: Traced) -> fx.Node:
    """The argument with the random seed, added to the graph when it is first needed."""
    if traced.random is None:
        last = traced.placeholders[-1]
        with traced.root.graph.inserting_after(last), traced.mode:
            traced.random = traced.root.graph.placeholder("random")
            # One more element than the caller passes: kernels add the number of their dropout.
            traced.random.meta["val"] = torch.empty(4, dtype=torch.int64, device=traced.device)
    return traced.random
