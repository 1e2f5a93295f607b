"""Schedules whose stages go down the ranks and back up: stage s is on rank min(s, 2*pp - 1 - s).

Each rank has one stage on the way down (half 0) and one on the way back (half 1). A row is first
written as a script of passes on halves. Numbering it gives each pass the next microbatch of its
half.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, count, product, starmap

from piper.names import BI, BW, B, F, Phase
from piper.strategies.schedules.sizes import note_bubble, require_at_least, require_mirror
from piper.strategies.schedules.table import Action, Row, Table

Step = tuple[tuple[Phase, int], ...]  # the passes of one slot, each with its half
Script = list[Step]

F0, B0, I0, W0 = (((phase, 0),) for phase in (F, B, BI, BW))
F1, B1, I1, W1 = (((phase, 1),) for phase in (F, B, BI, BW))


def zbv(pp: int, microbatches: int) -> Table:
    """Zero bubble, V-shaped: no bubble inside a rank's row if F, BI and BW take equal time.

    >>> print(zbv(pp=2, microbatches=3))
    PP rank 0  0F0 0F1 0F2 3F0 3BI0 3BW0 3F1 3BI1 3BW1 0BI0 0BW0 3F2 3BI2 3BW2 0BI1 0BW1 0BI2 0BW2
    PP rank 1  1F0 2F0 1F1 2F1 2BI0 2BW0 1F2 1BI0 1BW0 2F2 2BI1 2BW1 1BI1 2BI2 1BI2 1BW1 2BW2 1BW2
    """
    require_at_least("zbv", 1, pp=pp, microbatches=microbatches)
    note_bubble("zbv", pp, microbatches)
    scripts = (zbv_script(rank, pp, microbatches) for rank in range(pp))
    return table_of(scripts, pp, microbatches)


def zbv_script(rank: int, pp: int, microbatches: int) -> Script:
    """With too few microbatches to fill the V, `numbered` cuts the script of a full V."""
    filled = max(microbatches, 2 * pp - 1)
    below = pp - rank  # ranks from here to the turn of the V
    return [
        *[F0] * (2 * below - 1),
        *[F1, F0] * rank,
        *[F1, I1, W1] * below,
        *[F0, I0, W0, F1, I1, W1] * (filled - 2 * pp + rank + 1),
        *[I0, W0, F1, I1, W1] * (below - 1),
        *[I0, I1] * rank,
        *[I0, W0] * below,
        *[W1] * rank,
        *[W0] * rank,
    ]


def dualpipev(pp: int, microbatches: int) -> Table:
    """DualPipe folded to a V: forwards of one half overlap backwards of the other.

    >>> print(dualpipev(pp=2, microbatches=4))
    PP rank 0  0F0 0F1 0F2 3F0 3BI0 3BW0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 0BI2 0BW2 0BI3 0BW3
    PP rank 1  1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 2BI3 1BI3 2BW3 1BW3
    """
    require_at_least("dualpipev", 1, pp=pp, microbatches=microbatches)
    note_bubble("dualpipev", pp, microbatches, needed=2 * pp)
    return dualpipe_table(pp, microbatches)


def dualpipe(pp: int, microbatches: int) -> Table:
    """Two replicas whose stages are in opposite order: device d has stages d and pp-1-d.

    Devices d and pp-1-d then run the same row, each for its own replicas, so the table has one row
    for both: the row of a V on half the ranks. `microbatches` counts those of one replica.

    >>> print(dualpipe(pp=4, microbatches=4))
    PP rank 0  0F0 0F1 0F2 3F0 3BI0 3BW0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 0BI2 0BW2 0BI3 0BW3
    PP rank 1  1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 2BI3 1BI3 2BW3 1BW3
    """
    require_mirror("dualpipe", pp)
    require_at_least("dualpipe", 1, microbatches=microbatches)
    note_bubble("dualpipe", pp, microbatches)
    return dualpipe_table(pp // 2, microbatches)


def dualpipe_table(pp: int, microbatches: int) -> Table:
    """With too few microbatches to fill the V, `numbered` cuts the script of a full V."""
    filled = max(microbatches, 2 * pp)
    scripts = (dualpipe_script(rank, pp, filled) for rank in range(pp))
    return table_of(scripts, pp, microbatches)


def dualpipe_script(rank: int, pp: int, microbatches: int) -> Script:
    """The eight steps of DualPipe; rank is the distance to the nearer end of the pipeline."""
    turn = pp - 1 - rank  # ranks from the next one to the turn of the V
    main: Script = [F0 + B1, F1 + B0] * (microbatches - 2 * pp + rank + 1)
    if turn == 0:
        main[:1] = [F0, B1]  # at the turn the first pair does not overlap, for a smaller bubble
    half = rank + 1  # of the last 2 * (rank + 1) backwards, the second half is split
    weights = [*([W1, W0] * half)[half:], *[W0] * turn]
    return [
        *[F0] * (2 * turn),
        *[F0, F1] * half,
        *[I1, W1, F1] * turn,
        *main,
        *[B1, F1 + B0] * turn,
        *([B1, B0] * half)[:half],
        *([I1, I0] * half)[half:],
        *chain.from_iterable((weight, I0) for weight in weights[:turn]),
        *weights[turn:],
    ]


def table_of(scripts: Iterable[Script], pp: int, microbatches: int) -> Table:
    halves = ((rank, 2 * pp - 1 - rank) for rank in range(pp))
    rows = (numbered(*row, microbatches) for row in zip(scripts, halves, strict=True))
    return Table(tuple(rows))


def numbered(script: Script, stages: tuple[int, int], microbatches: int) -> Row:
    """Give each pass the next microbatch of its half, and leave out those that there are not.

    A whole backward counts as BI and BW.
    """
    numbers = {item: count() for item in product((F, BI, BW), (0, 1))}

    def next_action(phase: Phase, half: int) -> Action:
        if phase is B:
            next(numbers[BW, half])
            return Action(stages[half], B, next(numbers[BI, half]))
        return Action(stages[half], phase, next(numbers[phase, half]))

    slots = (tuple(starmap(next_action, step)) for step in script)
    there = (tuple(a for a in slot if a.microbatch < microbatches) for slot in slots)
    return tuple(slot for slot in there if slot)
