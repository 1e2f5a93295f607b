"""From a strategy back to the table that its orders make, to draw, check or export it."""

from __future__ import annotations

from collections.abc import Iterable

from piper.directives import Order, Place, Split, Strategy
from piper.directives.arguments import as_slots
from piper.errors import Problem, StrategyError
from piper.ir.filters import Filter
from piper.names import PASS, Device, Phase
from piper.strategies.check import check
from piper.strategies.table import Action, Slot, Table
from piper.strategies.text import print_csv

Rows = dict[Device, list[Slot]]  # by the first device of a row's replicas


def to_csv(strategy: Strategy) -> str:
    """The schedule of a strategy in PyTorch's text, one row per device and its replicas."""
    return print_csv(to_table(strategy))


def to_table(strategy: Strategy) -> Table:
    """The schedule of a strategy; refuses one whose orders are not those of a pipeline."""
    homes, split = stage_homes(strategy), split_name(strategy)
    rows: Rows = {}
    for name, order in named_orders(strategy):
        mine = order_rows(name, order, homes, split)
        refuse_second_order(name, rows, mine)
        rows |= mine
    table = Table(tuple(tuple(row) for _, row in sorted(rows.items())))
    check(table)
    return table


def stage_homes(strategy: Strategy) -> dict[int, Device]:
    """The first device of each stage: enough to tell rows apart, because replicas share a row."""
    return {
        value: min(directive.devices)
        for directive in strategy
        if isinstance(directive, Place) and directive.filter.keys == ("PP",)
        for _, value in directive.filter.items
        if isinstance(value, int)
    }


def split_name(strategy: Strategy) -> str:
    return next((d.name for d in strategy if isinstance(d, Split)), "MB")


def named_orders(strategy: Strategy) -> list[tuple[str, Order]]:
    orders = [
        (f"order (directive {step} of {len(strategy)})", directive)
        for step, directive in enumerate(strategy, start=1)
        if isinstance(directive, Order)
    ]
    if orders:
        return orders
    fix = "add one Order per device, or start from a schedule such as piper.strategies.gpipe"
    raise StrategyError("strategy", Problem("nothing says in which order stages run", fix))


def order_rows(name: str, order: Order, homes: dict[int, Device], split: str) -> Rows:
    """What an order says for each device; one that spans devices orders each by itself."""
    slots = as_slots(order.slots)
    read = [(wanted, action_of(wanted, split)) for slot in slots for wanted in slot]
    refuse(name, (no_pass(wanted, split) for wanted, action in read if action is None))
    refuse(name, unplaced([action for _, action in read if action], homes))
    actions = dict(read)
    rows: Rows = {}
    for slot in slots:
        mine: dict[Device, list[Action]] = {}
        for action in filter(None, map(actions.get, slot)):
            mine.setdefault(homes[action.stage], []).append(action)
        for device, together in mine.items():
            rows.setdefault(device, []).append(tuple(together))
    return rows


def action_of(wanted: Filter, split: str) -> Action | None:
    """The one action a filter names, if it names one."""
    tags = dict(wanted.items)
    stage, microbatch, phase = (tags.get(key) for key in ("PP", split, PASS))
    if len(tags) == 3 and isinstance(stage, int) and isinstance(microbatch, int):
        return Action(stage, Phase(phase), microbatch) if phase in tuple(Phase) else None
    return None


def no_pass(wanted: Filter, split: str) -> Problem:
    what = f"{wanted} is not one pass of one stage on one microbatch, so no schedule can show it"
    return Problem(what, f'write where(PP=0, {split}=0, PASS="F")')


def unplaced(actions: Iterable[Action], homes: dict[int, Device]) -> list[Problem]:
    lost = dict.fromkeys(action.stage for action in actions if action.stage not in homes)
    return [
        Problem(f"stage {stage} has no device", f"add Place(where(PP={stage}), devices=[...])")
        for stage in lost
    ]


def refuse(name: str, problems: Iterable[Problem]) -> None:
    if found := tuple(problems):
        raise StrategyError(name, *found[:10])


def refuse_second_order(name: str, rows: Rows, mine: Rows) -> None:
    refuse(
        name,
        [
            Problem(
                f"device {device} has an order already, and the two say nothing of each other",
                "write both as one Order",
            )
            for device in mine
            if device in rows
        ],
    )
