"""Random operations of a model become reproducible: their numbers depend on seed and position."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from piper.capture import refusals
from piper.capture.fx_nodes import arguments, insert, line, value
from piper.capture.kernels import random_operators as ops
from piper.capture.kernels.dropout import DROPOUT
from piper.capture.torch_private import argument_names
from piper.capture.trace.decisions.shared_draws import ONCE
from piper.capture.trace.forward import Traced
from piper.names import amount

LOG = logging.getLogger("piper")
aten = torch.ops.aten
Given = dict[str, Any]  # arguments of an operator of torch, by name
Made = tuple[Any, Any, tuple[Any, ...]]  # Piper's operator, what it is like, its other arguments
Translation = Callable[[fx.Node, Given], Made | None]  # None: it is not random after all


def make_reproducible(traced: Traced) -> None:
    """Number the random operations of the model and let each read `traced.random`."""
    numbered, apart = 0, 0
    for node in list(traced.root.graph.nodes):
        if node.target is ATTENTION and not _is_random(node):
            continue
        if node.target in TRANSLATIONS:
            apart += node.target is ATTENTION
            numbered += _replace(traced, node, numbered)
        elif _is_random(node):
            raise refusals.random_operation(node)
    if apart:
        LOG.info(
            "dropout in %s: its weights are computed as tensors, which need memory for every pair "
            "of tokens; set the dropout of attention to 0 to avoid it",
            amount(apart, "attention"),
        )


def _replace(traced: Traced, node: fx.Node, number: int) -> bool:
    """Return whether the operation is random, and so takes a number."""
    given = arguments(node)
    if given.get("generator") is not None:
        raise refusals.own_generator(line(node))
    made = TRANSLATIONS[node.target](node, given)
    if made is None:
        result = given.get("input", given.get("self"))
    else:
        target, like, rest = made
        with traced.root.graph.inserting_before(node):
            random = _random(traced)
            if node.meta.get(ONCE):
                random = insert(traced.root.graph, node, ops.ONCE, random)
            passed = (random if like is None else like, random, number, *rest)
            result = traced.root.graph.call_function(target, passed)
        result.meta = node.meta
    if result is not node:
        node.replace_all_uses_with(result)
        traced.root.graph.erase_node(node)
    return made is not None


# How operators of torch are written with Piper's


def _dropout(target: Any, *rest: Any) -> Translation:
    def translated(node: fx.Node, given: Given) -> Made | None:
        active = bool(given["train"]) and given["p"] > 0
        return (target, given["input"], (given["p"], *rest)) if active else None

    return translated


def _sized(target: Any) -> Translation:
    """A tensor of the size and type that the trace saw."""
    return lambda node, given: (target, None, (list(value(node).shape), value(node).dtype))


def _integers(node: fx.Node, given: Given) -> Made:
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


ATTENTION = aten.scaled_dot_product_attention.default
TRANSLATIONS: dict[Any, Translation] = {
    aten.dropout.default: _dropout(DROPOUT),
    aten.feature_dropout.default: _dropout(ops.FEATURE_DROPOUT),
    aten.alpha_dropout.default: _dropout(ops.ALPHA_DROPOUT, False),
    aten.feature_alpha_dropout.default: _dropout(ops.ALPHA_DROPOUT, True),
    aten.rand.default: _sized(ops.RAND),
    aten.rand_like.default: _sized(ops.RAND),
    aten.randn.default: _sized(ops.RANDN),
    aten.randn_like.default: _sized(ops.RANDN),
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


def _is_random(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    # Attention and recurrent layers are tagged because of their dropout.
    names = argument_names(node)
    probability = next((name for name in ("dropout_p", "dropout") if name in names), None)
    if probability is None:
        return True
    given = [*node.args, *(None for _ in names)][names.index(probability)]
    return (given or node.kwargs.get(probability) or 0.0) != 0.0
