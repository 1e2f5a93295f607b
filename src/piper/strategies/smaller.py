"""Changes of a strategy that need less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from piper.directives import Directive, Offload, Order, Remat, Replicate, Split, Strategy
from piper.directives.offload import What
from piper.errors import StrategyError
from piper.ir.filters import where
from piper.strategies import schedules
from piper.strategies.assembly import orders_of
from piper.strategies.export import to_table
from piper.strategies.schedules.table import Table

Change = tuple[str, Strategy]  # what a user would write, and the strategy with it


def smaller(strategy: Strategy) -> Iterator[Change]:
    """Strategies for the same devices and batch, in the order in which to try them."""
    levels = [one.zero for one in strategy if isinstance(one, Replicate)]
    higher = range(min(levels) + 1, 4) if levels else range(0)
    for keep in ("auto", "matmuls", "attention"):
        yield f'remat="{keep}"', recomputed(strategy, keep)
    yield "remat=True", recomputed(strategy, ())
    yield from away(strategy)
    yield from ((f"zero={level}", at_level(strategy, level)) for level in higher)
    if higher:
        yield 'zero=3, remat="auto"', recomputed(at_level(strategy, 3), "auto")
    yield from least(strategy, bool(higher))
    n = strategy.microbatches
    for more in (2 * n, 4 * n):
        found = with_microbatches(strategy, more)
        if found is not None:
            yield f"microbatches={more}", found
            yield f'microbatches={more}, remat="auto"', recomputed(found, "auto")


KINDS: tuple[What, ...] = ("activations", "optimizer", "parameters")
TOGETHER: tuple[tuple[What, ...], ...] = (KINDS[:2], KINDS[1:], KINDS)


def away(strategy: Strategy) -> Iterator[Change]:
    """More and more in host memory, beside what waits there already."""
    have = {one.what for one in strategy if isinstance(one, Offload) and one.filter == where()}
    some = [(kind,) for kind in KINDS] + [*TOGETHER]
    wanted = dict.fromkeys(tuple(k for k in KINDS if k in have or k in new) for new in some)
    for kinds in wanted:
        if set(kinds) != have:
            yield f"offload={listed(kinds)}", offloaded(strategy, kinds)


def least(strategy: Strategy, shards: bool) -> Iterator[Change]:
    """Everything that saves memory without another batch or schedule."""
    found = offloaded(recomputed(strategy, ()), KINDS)
    yield f"remat=True, offload={listed(KINDS)}", found
    if shards:
        yield f"zero=3, remat=True, offload={listed(KINDS)}", at_level(found, 3)


def listed(kinds: tuple[What, ...]) -> str:
    """
    >>> print(listed(("optimizer",)), listed(("optimizer", "parameters")))
    "optimizer" ["optimizer", "parameters"]
    """
    text = ", ".join(f'"{what}"' for what in kinds)
    return text if len(kinds) == 1 else f"[{text}]"


def recomputed(strategy: Strategy, keep: str | tuple[str, ...]) -> Strategy:
    """Everything is recomputed, but for what is kept."""
    return Strategy(
        [*(one for one in strategy if not isinstance(one, Remat)), Remat(where(), keep)]
    )


def offloaded(strategy: Strategy, what: tuple[What, ...]) -> Strategy:
    """These wait in host memory, of all regions."""
    done = [one for one in strategy if isinstance(one, Offload) and one.filter == where()]
    new = [one for one in what if all(one != old.what for old in done)]
    others = [one for one in strategy if not isinstance(one, Offload) or one.what not in new]
    return Strategy([*others, *(Offload(where(), one) for one in new)])


def at_level(strategy: Strategy, zero: int) -> Strategy:
    """Replicas that shard at least as much as this level."""

    def raised(one: Directive) -> Directive:
        if not isinstance(one, Replicate):
            return one
        return replace(one, zero=max(one.zero, zero))

    return Strategy(map(raised, strategy))


def with_microbatches(strategy: Strategy, n: int) -> Strategy | None:
    """The same schedule for other microbatches. None: it is no known schedule, or not for these."""
    others = [one for one in strategy if not isinstance(one, Order | Split)]
    orders = [one for one in strategy if isinstance(one, Order)]
    split = next((one for one in strategy if isinstance(one, Split)), Split("MB", n))
    if not orders:
        return Strategy([*others, replace(split, n=n)])
    if split.name != "MB":
        return None
    with suppress(StrategyError):
        table = for_microbatches(to_table(strategy), n)
        if table is not None:
            return Strategy([*others, replace(split, n=n), *orders_of(table, orders[0].ahead)])
    return None


def for_microbatches(table: Table, n: int) -> Table | None:
    """The known schedule that this table is, for n microbatches."""
    pp, before = len(table.rows), table.microbatches
    virtual = table.stages // pp
    looped = (schedules.interleaved_one_f_one_b, schedules.interleaved_zb)
    makers: list[Callable[[int, int], Table]] = [
        schedules.one_f_one_b,
        schedules.gpipe,
        schedules.zb_h1,
        schedules.zbv,
    ]
    makers += [schedules.dualpipev, *(partial(make, virtual=virtual) for make in looped)]
    for make in makers:
        with suppress(StrategyError):
            if make(pp, before) == table:
                return make(pp, n)
    return None
