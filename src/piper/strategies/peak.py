"""How many activations a rank holds at once."""

from piper.names import BW, B, F
from piper.strategies.schedules.table import Row, Table, ranks_of


def peaks(table: Table) -> tuple[int, ...]:
    """For each rank, the largest number of forwards that still wait for their weight gradients.

    Counted in activations of one stage for one microbatch. Passes in one slot are live together.

    >>> from piper.strategies.schedules import one_f_one_b
    >>> peaks(one_f_one_b(pp=3, microbatches=8))
    (3, 2, 1)
    """
    return tuple(map(peak, table.rows))


def peak(row: Row) -> int:
    held = most = 0
    for slot in row:
        held += sum(action.phase is F for action in slot)
        most = max(most, held)
        held -= sum(action.phase in (B, BW) for action in slot)
    return most


def stage_peaks(table: Table) -> tuple[int, ...]:
    """The same for each stage.

    >>> from piper.strategies.schedules import zbv
    >>> stage_peaks(zbv(pp=2, microbatches=8))
    (4, 3, 2, 1)
    """
    rows = [
        tuple(tuple(a for a in slot if a.stage == stage) for slot in table.rows[rank])
        for stage, rank in sorted(ranks_of(table).items())
    ]
    return tuple(map(peak, rows))
