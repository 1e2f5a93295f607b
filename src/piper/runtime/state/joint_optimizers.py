"""Optimizers that look at several parameters at once, which separate buckets do not allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from piper.errors import StrategyError
from piper.runtime.state.common_quantities import depend_on_each_other
from piper.runtime.torch_private import has_own_step

Named = list[tuple[str, torch.nn.Parameter]]
Make = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
SCALES = (1e3, 1.0, 1e-3)  # of gradients, one step each: reveals clipping by a norm


def refuse_joint(make: Make, optimizer: torch.optim.Optimizer, named: Named) -> None:
    """Try an optimizer that is not torch's on two small parameters: together, and one by one.

    If it cannot be tried on them, assume that it is fine.
    """
    if is_known(optimizer):
        return
    names = [(name, parameter.dim()) for name, parameter in named][:2]
    names += [(f"{names[0][0]}_again", names[0][1])] if len(names) == 1 else []
    try:
        together, alone = trained(make, [names]), trained(make, [[one] for one in names])
    except Exception:
        return
    pairs = zip(together, alone, strict=True)
    if any(not torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs):
        raise joint(optimizer)


def refuse_common(make: Make, buckets: Sequence[Named]) -> None:
    """One that looks at several parameters only late or seldom, where there are several buckets."""
    pairs = list(pairs_of(buckets))
    if not pairs:
        return
    try:
        optimizer = make(list(pairs[0]))
    except Exception:  # whatever it is, it happens in the calls that count as well
        return
    kinds = ([(name, one.dim()) for name, one in pair] for pair in pairs)
    if not is_known(optimizer) and any(depend_on_each_other(make, pair) for pair in kinds):
        raise joint(optimizer)


def pairs_of(buckets: Sequence[Named]) -> Iterator[Named]:
    """Parameters of different buckets: the first and the last, and two with so many dimensions."""
    filled = [bucket for bucket in buckets if bucket]
    if len(filled) > 1:
        yield [filled[0][0], filled[-1][-1]]
    for dims in sorted({one.dim() for bucket in filled for _, one in bucket}):
        alike = [[pair for pair in bucket if pair[1].dim() == dims] for bucket in filled]
        firsts = [found[0] for found in alike if found]
        if len(firsts) > 1:
            yield firsts[:2]


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's, as it is, or says that it treats every element by itself."""
    own = is_torchs(type(optimizer)) and not has_own_step(optimizer)
    return own or getattr(optimizer, "elementwise", False)


def is_torchs(kind: type) -> bool:
    """
    >>> class Adam(torch.optim.Adam): ...
    >>> is_torchs(torch.optim.Adam), is_torchs(Adam)
    (True, False)
    """
    return vars(torch.optim).get(kind.__name__) is kind


def joint(optimizer: torch.optim.Optimizer) -> StrategyError:
    return StrategyError.of(
        "optimizer",
        f"{type(optimizer).__name__} updates parameters together differently than one by one, and "
        "every bucket of parameters has its own optimizer",
        "look at one parameter at a time; to clip by the norm of all gradients, give "
        "Trainer(max_norm=...)",
    )


def trained(make: Make, groups: list[list[tuple[str, int]]]) -> list[torch.Tensor]:
    """Small parameters after a few steps, with an optimizer for each group."""
    draw = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        made = [
            [(name, torch.nn.Parameter(torch.randn([2] * dims, generator=draw)))
             for name, dims in group]
            for group in groups
        ]  # fmt: skip
        optimizers = [make(list(group)) for group in made]
    flat = [parameter for group in made for _, parameter in group]
    for scale in SCALES:
        for parameter in flat:
            parameter.grad = scale * torch.randn(parameter.shape, generator=draw)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in flat]
