"""Every private API of Inductor that capture uses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from piper.capture.torch_private import OpOverload


def compile_graph(
    module: fx.GraphModule, inside: dict[OpOverload, Callable]
) -> Callable[[list[Any]], Any]:
    """Inductor's version of a graph, from a list of tensors, which it empties, to a tuple of them.

    `inside` maps Piper's own operators to their decompositions, so that Inductor can fuse them.
    """
    from torch._inductor.compile_fx import compile_fx  # takes seconds to import
    from torch._inductor.decomposition import select_decomp_table

    example = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        found = compile_fx(module, example, decompositions={**select_decomp_table(), **inside})
    return _taking_a_list(_without_guard(found), module)


def _taking_a_list(
    function: Callable[..., Any], module: fx.GraphModule
) -> Callable[[list[Any]], Any]:
    """The function behind the one that keeps its arguments alive during the call.

    That one puts the constants of the module before them, so there must be none.
    """
    inner: Callable[[list[Any]], Any] | None = getattr(function, "__wrapped__", None)
    constants = [*module.parameters(), *module.buffers()]
    if inner is not None and getattr(inner, "_boxed_call", False) and not constants:
        return inner
    return lambda arguments: function(*arguments)


def _without_guard(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind the guard against Dynamo, which is not needed and takes 15 us a call.

    A wrapper around the guard has the same attributes, so the id tells whether they are its own.
    """
    own = getattr(function, "_torchdynamo_wrapper_id", None) == id(function)
    found: Callable[..., Any] = function._torchdynamo_orig_callable if own else function  # type: ignore[attr-defined]
    return found
