"""The option `remat` of builders: which stages recompute, and what they keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.directives.remat import Remat
from piper.errors import Refused, StrategyError
from piper.ir.filters import where

RematOption = bool | str | float | Sequence[int] | Sequence[str]


def remats_of(option: RematOption, stages: int) -> Iterator[Remat]:
    """
    >>> list(remats_of("matmuls", 2)), list(remats_of([1], 2))
    ([Remat(filter=where(), keep=('matmuls',))], [Remat(filter=where(PP=1))])
    """
    if option is False:
        return
    if option is True:
        yield Remat(where())
    elif isinstance(option, list | tuple) and all(type(one) is int for one in option):
        refuse_unknown(option, stages)
        yield from (Remat(where(PP=stage)) for stage in dict.fromkeys(option))
    else:
        try:
            yield Remat(where(), option)  # type: ignore[arg-type]
        except Refused as refused:
            (problem,) = refused.problems
            fix = f"{problem.fix}; True recomputes everything, [0, 1] only these stages"
            what = problem.what.replace("keep=", "remat=", 1)
            raise StrategyError.of("strategy", what, fix) from None


def refuse_unknown(option: Sequence[object], stages: int) -> None:
    unknown = [stage for stage in option if stage not in range(stages)]
    if unknown:
        what = f"remat={list(option)} has stage {unknown[0]}, but the schedule has {stages}"
        fix = f"list stages from 0 to {stages - 1}"
        raise StrategyError.of("strategy", what, fix)
