"""Every private API of Inductor that capture uses."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import Strides, strides_of
from piper.capture.torch_private import OpOverload
from piper.capture.tracing_private import own_derivatives_kept

# Decompositions of torch that give other numbers than the operator (at torch 2.13).
_WRONG = (torch.ops.aten.multilabel_margin_loss_forward.default,)


def compile_graph(
    module: fx.GraphModule, inside: dict[OpOverload, Callable]
) -> Callable[[list[Any]], Any]:
    """Inductor's version of a graph, from a list of tensors, which it empties, to a tuple of them.

    `inside` maps Piper's own operators to their decompositions, so that Inductor can fuse them.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx  # takes seconds to import
    from torch._inductor.decomposition import select_decomp_table

    example = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    strides = [strides_of(node) for node in module.graph.output_node().args[0]]
    known = [one for one in strides if one is not None]
    padding = config.shape_padding and len(known) == len(strides)
    with (
        torch.no_grad(),
        config.patch(shape_padding=padding),
        own_derivatives_kept(),
        _kernels_allowed(),
    ):
        table = {op: one for op, one in select_decomp_table().items() if op not in _WRONG}
        found = compile_fx(module, example, decompositions={**table, **inside})
    kernel = _taking_a_list(_without_guard(found), module)
    return _with_layouts(kernel, known) if padding else kernel


@contextmanager
def _kernels_allowed() -> Iterator[None]:
    """Inductor may call the kernels of operators whose decompositions are wrong.

    It asks why it should not decompose them, and where `CI` is set it stops there.
    """
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST

    names = {op.name() for op in _WRONG} - FALLBACK_ALLOW_LIST
    FALLBACK_ALLOW_LIST.update(names)
    try:
        yield
    finally:
        FALLBACK_ALLOW_LIST.difference_update(names)


def _with_layouts(
    kernel: Callable[[list[Any]], Any], strides: Sequence[Strides]
) -> Callable[[list[Any]], Any]:
    """Results in the memory layout of the graph, which the graphs that read them rely on.

    Inductor pads products on a GPU if that is faster. Of a padded one, it returns a view.
    """
    padded: list[int] | None = None

    def call(arguments: list[Any]) -> Any:
        nonlocal padded
        results = kernel(arguments)
        if padded is None:
            pairs = enumerate(zip(results, strides, strict=True))
            padded = [k for k, (one, wanted) in pairs if not _is_laid_out(one, wanted)]
        if padded:
            results = list(results)
            for k in padded:
                results[k] = _copied(results[k], strides[k])
        return results

    return call


def _is_laid_out(result: Any, strides: Strides) -> bool:
    """Strides along dimensions of size 1 mean nothing."""
    if not isinstance(result, Tensor) or not result.numel():
        return True
    pairs = zip(result.shape, result.stride(), strides, strict=True)
    return all(size == 1 or mine == wanted for size, mine, wanted in pairs)


def _copied(tensor: Tensor, strides: Strides) -> Tensor:
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


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
