"""The schedule table of a strategy, to draw, check or export it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from piper.directives import Order, Place, Split, Strategy
from piper.directives.arguments import as_slots
from piper.errors import Problem, StrategyError
from piper.ir.filters import Filter
from piper.ir.message_order import names_operations
from piper.names import PASS, Device, Phase
from piper.strategies.check import check
from piper.strategies.pytorch_csv import print_csv
from piper.strategies.schedules.table import Action, Slot, Table

Rows = dict[Device, list[Slot]]  # by the first of the devices that run a row


def to_csv(strategy: Strategy) -> str:
    """The schedule of a strategy in PyTorch's CSV format, one row per device and its replicas."""
    return print_csv(to_table(strategy))


def to_table(strategy: Strategy) -> Table:
    """The schedule of a strategy whose orders are those of a pipeline."""
    homes, split = stage_homes(strategy), split_name(strategy)
    rows: Rows = {}
    for name, order in named_orders(strategy):
        mine = order_rows(name, order, homes, split)
        require_one_order(name, rows, mine)
        rows |= mine
    table = Table(tuple(tuple(row) for _, row in sorted(rows.items())))
    check(table)
    return table


def table_of_orders(orders: Sequence[Order], split: str = "MB") -> Table:
    """The table of orders that stand alone, one for each rank."""
    rows = []
    for rank, order in enumerate(orders):
        read = [[(wanted, action_of(wanted, split)) for wanted in slot] for slot in order.steps]
        bad = [wanted for slot in read for wanted, act in slot if act is None]
        raise_if_any(f"order {rank + 1} of {len(orders)}", no_actions(bad, split))
        rows.append(tuple(tuple(act for _, act in slot if act) for slot in read))
    return Table(tuple(rows))


def stage_homes(strategy: Strategy) -> dict[int, Device]:
    """The first device of each stage. It identifies a row, because replicas run the same row."""
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
        if isinstance(directive, Order) and not names_messages(directive)
    ]
    if orders:
        return orders
    fix = "add one Order per device, or start from a schedule such as piper.strategies.gpipe"
    raise StrategyError.of("strategy", "it has no Order, so it has no schedule to show", fix)


def names_messages(order: Order) -> bool:
    """A table has passes only: orders with messages or updates add to it."""
    return any(names_operations(wanted) for slot in as_slots(order.slots) for wanted in slot)


def order_rows(name: str, order: Order, homes: dict[int, Device], split: str) -> Rows:
    """The slots of each device. An order that spans devices orders each of them separately."""
    slots = as_slots(order.slots)
    read = [(wanted, action_of(wanted, split)) for slot in slots for wanted in slot]
    raise_if_any(name, no_actions([wanted for wanted, act in read if act is None], split))
    raise_if_any(name, unplaced([action for _, action in read if action], homes))
    actions = dict(read)
    rows: Rows = {}
    for slot in slots:
        mine: dict[Device, list[Action]] = {}
        for action in filter(None, map(actions.get, slot)):
            mine.setdefault(homes[action.stage], []).append(action)
        for device, overlapped in mine.items():
            rows.setdefault(device, []).append(tuple(overlapped))
    return rows


def action_of(wanted: Filter, split: str) -> Action | None:
    """The action that a filter names, if it names exactly one."""
    tags = dict(wanted.items)
    stage, microbatch, phase = (tags.get(key) for key in ("PP", split, PASS))
    if len(tags) == 3 and isinstance(stage, int) and isinstance(microbatch, int):
        return Action(stage, Phase(phase), microbatch) if phase in tuple(Phase) else None
    return None


def no_actions(bad: Sequence[Filter], split: str) -> Iterator[Problem]:
    """One problem for all: they are mostly made by one line."""
    if not bad:
        return
    first, *others = bad
    said = {key: one for key, one in first.items if isinstance(one, int) or one in tuple(Phase)}
    unknown = [one for key, one in said.items() if key not in ("PP", split, PASS)]
    stage, part = said.get("PP", (*unknown, 0)[0]), said.get(split, 0)
    more = f" (nor are {len(others)} more)" if others else ""
    yield Problem(
        f"{first} is not one pass of one stage on one microbatch, as a schedule needs{more}",
        f'write where(PP={stage}, {split}={part}, PASS="{said.get(PASS, "F")}")',
    )


def unplaced(actions: Iterable[Action], homes: dict[int, Device]) -> list[Problem]:
    missing = dict.fromkeys(action.stage for action in actions if action.stage not in homes)
    return [
        Problem(f"stage {stage} has no device", f"add Place(where(PP={stage}), devices=[...])")
        for stage in missing
    ]


def raise_if_any(name: str, problems: Iterable[Problem]) -> None:
    if found := tuple(problems):
        raise StrategyError(name, *found[:10])


def require_one_order(name: str, rows: Rows, mine: Rows) -> None:
    fix = "write both as one Order"
    again = [device for device in mine if device in rows]
    what = "already has an order, and nothing orders the two"
    raise_if_any(name, (Problem(f"device {device} {what}", fix) for device in again))
