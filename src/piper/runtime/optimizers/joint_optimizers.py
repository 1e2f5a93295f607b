"""Optimizers that look at several parameters at once, which separate buckets do not allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch

from piper.errors import StrategyError
from piper.runtime.optimizers.common_quantities import depend_on_each_other
from piper.runtime.optimizers.known_optimizers import MakeOptimizer, Named, is_unchanged
from piper.runtime.optimizers.small_parameters import (
    Kind,
    close,
    fitting,
    kind,
    set_gradients,
    small,
)

MOST = 4  # groups, and pairs of each, that are tried
SCALES = (1e3, 1.0, 1e-3)  # of gradients, one step each: reveals clipping by a norm


def refuse_joint(make: MakeOptimizer, optimizer: torch.optim.Optimizer, named: Named) -> None:
    """Try an optimizer that is not torch's on two small parameters: together, and one by one.

    One that says that it works element by element may still count its steps, or draw numbers,
    outside of itself. If it cannot be tried on them, assume that it is fine.
    """
    if is_unchanged(optimizer):
        return
    kinds = [kind(*one) for one in named][:2]
    kinds += [replace(kinds[0], name=f"{kinds[0].name}_again")] if len(kinds) == 1 else []
    kinds = fitting(make, kinds)
    try:
        together, alone = trained(make, [kinds]), trained(make, [[one] for one in kinds])
    except Exception:
        return
    if not all(map(close, together, alone)):
        raise drawing(optimizer) if draws(make, kinds) else joint(optimizer)


def refuse_common(make: MakeOptimizer, buckets: Sequence[Named]) -> None:
    """One that looks at several parameters only late or seldom, where there are several buckets."""
    pairs = list(pairs_of(buckets))
    if not pairs:
        return
    try:
        optimizer = make(list(pairs[0]))
        groups = [] if is_unchanged(optimizer) else groups_of(make, buckets)
    except Exception:  # whatever it is, it happens in the calls that count as well
        return
    pairs += [pair for group in groups for pair in islice(pairs_of(group), MOST)]
    kinds = ([kind(*one) for one in pair] for pair in pairs)
    for pair in () if is_unchanged(optimizer) else kinds:
        if depend_on_each_other(make, pair):
            raise drawing(optimizer) if draws(make, fitting(make, pair)) else joint(optimizer)


def groups_of(make: MakeOptimizer, buckets: Sequence[Named]) -> list[list[Named]]:
    """The parameters in each group of an optimizer of all, by bucket: it may treat them together.

    One group of all has the pairs that others have, too.
    """
    groups = make([one for bucket in buckets for one in bucket]).param_groups
    ids = [{id(one) for one in group["params"]} for group in groups]
    apart = [[[p for p in bucket if id(p[1]) in own] for bucket in buckets] for own in ids]
    return apart[:MOST] if len(apart) > 1 else []


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


def joint(optimizer: torch.optim.Optimizer) -> StrategyError:
    return StrategyError.of(
        "optimizer",
        f"{type(optimizer).__name__} updates parameters together differently than one by one, and "
        "every bucket of parameters has its own optimizer",
        "look at one parameter at a time; to clip by the norm of all gradients, give "
        "Trainer(max_norm=...)",
    )


def draws(make: MakeOptimizer, kinds: list[Kind]) -> bool:
    """Whether the same steps give other values when they are done again."""
    return not all(map(close, trained(make, [kinds]), trained(make, [kinds])))


def drawing(optimizer: torch.optim.Optimizer) -> StrategyError:
    """One that gives other values for the same gradients, as SGLD does."""
    return StrategyError.of(
        "optimizer",
        f"{type(optimizer).__name__} gives other values for the same gradients: it draws random "
        "numbers in its step, or counts in something that other optimizers share. Every bucket of "
        "parameters has its own optimizer, and each would draw or count for itself",
        "count in its own attributes (`self.count += 1`); let the model draw random numbers, which "
        "are then the same under every strategy: `loss + scale * (torch.randn_like(p) * p).sum()` "
        "adds noise to the gradient of p",
    )


def trained(make: MakeOptimizer, groups: list[list[Kind]]) -> list[torch.Tensor]:
    """Small parameters after a few steps, with an optimizer for each group."""
    named = small([one for group in groups for one in group])
    rest = iter(named)
    with torch.enable_grad():
        optimizers = [make([next(rest) for _ in group]) for group in groups]
    parameters = [parameter for _, parameter in named]
    for step, scale in enumerate(SCALES):
        set_gradients(parameters, step, scale)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in parameters]
