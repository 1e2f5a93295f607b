"""Results in the layout that eager training gives them, where the trace would give another one.

Whether `x.flatten(1)` is a view of `x`, to which it writes, and whether `x.view(-1)` is possible at
all, follows from how `x` lies in memory. After these operators, tensors without values lie in
another order than real ones, so a small real call shows which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.capture.fx_nodes import is_contiguous, order_of
from piper.capture.torch_private import outside_of_traces, pytree

aten = torch.ops.aten
MOST = 2**16  # elements of a call that is made as it is
UNSURE = frozenset({
    aten.copysign.Tensor, aten.div.Tensor_mode, aten.floor_divide.default, aten.pow.Scalar,
    aten.logaddexp.default, aten.logaddexp2.default, aten.xlogy.Tensor, aten.special_xlogy.default,
    aten.special_xlog1py.default, aten.log_sigmoid.default, aten.binary_cross_entropy.default,
    aten.batch_norm.default, aten.rrelu.default, aten.rrelu_with_noise.default,
    aten.complex.default, aten.nll_loss_nd.default, aten.cross_entropy_loss.default,
    aten.roll.default, aten.channel_shuffle.default,
    aten.max_unpool2d.default, aten.fft_fftshift.default, aten.fft_ifftshift.default,
})  # fmt: skip
Order = tuple[int, ...]
Dispatch = Callable[..., Any]  # an operator of the trace
CONTIGUOUS = {"memory_format": torch.contiguous_format}


def as_in_eager(func: Any, args: Any, kwargs: Any, found: Any, dispatch: Dispatch) -> Any:
    """What an operator returned in a trace, copied to the order of a real result."""
    if func not in UNSURE or not isinstance(found, Tensor) or found.dim() < 2:
        return found
    given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if all(map(is_contiguous, given)):
        return found
    order, wanted = dense_order(found), real_order(func, args, kwargs)
    if wanted is None or wanted == order:
        return found
    moved = dispatch(func=aten.permute.default, args=(found, list(wanted)))
    dense = dispatch(func=aten.clone.default, args=(moved,), kwargs=CONTIGUOUS)
    back = [wanted.index(dim) for dim in range(len(wanted))]
    return dispatch(func=aten.permute.default, args=(dense, back))


def dense_order(tensor: Tensor) -> Order:
    """The dimensions from outermost to innermost."""
    return order_of(tensor) or tuple(range(tensor.dim()))


def real_order(func: Any, args: Any, kwargs: Any) -> Order | None:
    """That of a result on numbers, of small sizes. None: it cannot be called."""
    given = pytree.tree_leaves((args, kwargs))
    tensors = [one for one in given if isinstance(one, Tensor)]
    small = smaller([size for one in tensors for size in one.shape])
    if small is None:
        return None
    if sum(one.numel() for one in tensors) <= MOST:
        small = {size: size for size in small}
    try:
        with outside_of_traces(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            like = [real(one, small) if isinstance(one, Tensor) else one for one in given]
            own, options = pytree.tree_unflatten(like, pytree.tree_structure((args, kwargs)))
            found = func(*own, **options)
    except Exception:  # it needs values, or the sizes as they are
        return None
    return dense_order(found)


def smaller(sizes: Sequence[Any]) -> dict[int, int] | None:
    """Equal sizes stay equal, and others stay different."""
    if not all(isinstance(size, int) for size in sizes):
        return None
    kinds = sorted({size for size in sizes if size > 1})
    return {0: 0, 1: 1} | {size: min(size, 2 + k) for k, size in enumerate(kinds)}


def real(tensor: Tensor, small: dict[int, int]) -> Tensor:
    """Zeros that lie in memory as the tensor does."""
    order = dense_order(tensor)
    sizes = [small[int(tensor.shape[dim])] for dim in order]
    made = torch.zeros(sizes, dtype=tensor.dtype)
    return made.permute([order.index(dim) for dim in range(len(order))])
