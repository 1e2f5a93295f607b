"""The option `offload` of builders: what waits in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper.directives.offload import Offload, What
from piper.errors import Refused, StrategyError
from piper.ir.filters import where

OffloadOption = What | Sequence[What] | None


def offloads_of(option: OffloadOption) -> Iterator[Offload]:
    """
    >>> list(offloads_of("activations"))
    [Offload(filter=where(), what='activations', stream='offload')]
    """
    if option is None:
        return
    names: object = (option,) if isinstance(option, str) else option
    if not isinstance(names, list | tuple):
        names = (option,)
    for what in dict.fromkeys(names):
        try:
            yield Offload(where(), what)
        except Refused as refused:
            (problem,) = refused.problems
            text = problem.what.replace("what=", "offload=", 1)
            raise StrategyError.of("strategy", text, problem.fix) from None
