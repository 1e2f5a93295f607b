"""Schedules that assign stages to ranks round-robin: stage s is on rank s % pp."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, repeat

from piper.names import BI, BW, B, F, Phase
from piper.strategies.schedules.sizes import (
    microbatches_per_round,
    note_bubble,
    require_at_least,
    require_virtual_stages,
)
from piper.strategies.schedules.table import Action, Row, Table, row_of


def gpipe(pp: int, microbatches: int) -> Table:
    """All forwards, then all backwards: every rank holds all microbatches.

    >>> print(gpipe(pp=3, microbatches=4))
    PP rank 0  F0 F1 F2 F3 B0 B1 B2 B3
    PP rank 1  F0 F1 F2 F3 B0 B1 B2 B3
    PP rank 2  F0 F1 F2 F3 B0 B1 B2 B3
    """
    require_at_least("gpipe", 1, pp=pp, microbatches=microbatches)
    note_bubble("gpipe", pp, microbatches)
    loop = Loop(pp, microbatches)
    return Table(tuple(loop.whole(rank, warmup=microbatches) for rank in range(pp)))


def one_f_one_b(pp: int, microbatches: int) -> Table:
    """One forward, one backward: rank r holds at most `pp - r` microbatches.

    >>> print(one_f_one_b(pp=3, microbatches=4))
    PP rank 0  F0 F1 F2 B0 F3 B1 B2 B3
    PP rank 1  F0 F1 B0 F2 B1 F3 B2 B3
    PP rank 2  F0 B0 F1 B1 F2 B2 F3 B3
    """
    require_at_least("1f1b", 1, pp=pp, microbatches=microbatches)
    note_bubble("1f1b", pp, microbatches)
    loop = Loop(pp, microbatches)
    return Table(tuple(loop.whole(rank, warmup=pp - 1 - rank) for rank in range(pp)))


def interleaved_one_f_one_b(pp: int, microbatches: int, virtual: int = 2) -> Table:
    """1F1B with `virtual` stages per rank: the bubble shrinks to 1/virtual, at more messages.

    >>> print(interleaved_one_f_one_b(pp=2, microbatches=4, virtual=2))
    PP rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    PP rank 1  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    loop = interleaved("interleaved-1f1b", pp, microbatches, virtual, instead="1f1b")
    return Table(tuple(loop.whole(r, loop.lead + 2 * (pp - 1 - r)) for r in range(pp)))


def zb_h1(pp: int, microbatches: int) -> Table:
    """1F1B with split backwards: delayed weight gradients fill the bubble at the end.

    Rank r delays r of them, so every rank holds at most `pp` microbatches: no more than the first
    rank of 1F1B.

    >>> print(zb_h1(pp=3, microbatches=4))
    PP rank 0  F0 F1 F2 BI0 BW0 F3 BI1 BW1 BI2 BW2 BI3 BW3
    PP rank 1  F0 F1 BI0 F2 BI1 BW0 F3 BI2 BW1 BI3 BW2 BW3
    PP rank 2  F0 BI0 F1 BI1 F2 BI2 BW0 F3 BI3 BW1 BW2 BW3
    """
    require_at_least("zb-h1", 1, pp=pp, microbatches=microbatches)
    note_bubble("zb-h1", pp, microbatches)
    loop = Loop(pp, microbatches)
    return Table(tuple(loop.split(rank, pp - 1 - rank, delay=rank) for rank in range(pp)))


def interleaved_zb(pp: int, microbatches: int, virtual: int = 2) -> Table:
    """ZB-H1 with `virtual` stages per rank.

    >>> print(interleaved_zb(pp=2, microbatches=2, virtual=2))
    PP rank 0  0F0 0F1 2F0 2F1 2BI0 2BW0 2BI1 2BW1 0BI0 0BW0 0BI1 0BW1
    PP rank 1  1F0 1F1 3F0 3BI0 3F1 3BI1 3BW0 1BI0 3BW1 1BI1 1BW0 1BW1
    """
    loop = interleaved("interleaved-zb", pp, microbatches, virtual, instead="zb-h1")
    return Table(tuple(loop.split(r, loop.lead + pp - 1 - r, delay=r) for r in range(pp)))


@dataclass(frozen=True, slots=True)
class Loop:
    """Stages on ranks round-robin, and the microbatches that go through them."""

    pp: int
    microbatches: int
    virtual: int = 1  # stages of each rank
    block: int | None = None  # microbatches of a stage before the next stage; None for all

    @property
    def lead(self) -> int:
        """The number of forwards of one block through all stages of a rank but the last."""
        return (self.virtual - 1) * (self.block or self.microbatches)

    def passes(self, rank: int, phase: Phase) -> list[Action]:
        """One pass of all stages of a rank: block by block, stage by stage."""
        stages = range(rank, self.pp * self.virtual, self.pp)
        block = self.block or self.microbatches
        return [
            Action(stage, phase, start + offset)
            for start in range(0, self.microbatches, block)
            for stage in (stages if phase is F else reversed(stages))
            for offset in range(block)
        ]

    def whole(self, rank: int, warmup: int) -> Row:
        backwards = [[action] for action in self.passes(rank, B)]
        return alternate(self.passes(rank, F), backwards, warmup)

    def split(self, rank: int, warmup: int, delay: int) -> Row:
        """Each BW runs right after the BI that is `delay` places later, or after the last BI."""
        backwards = [[action] for action in self.passes(rank, BI)]
        late = chain(backwards[delay:], repeat(backwards[-1]))
        for weight, backward in zip(self.passes(rank, BW), late, strict=False):
            backward.append(weight)
        return alternate(self.passes(rank, F), backwards, warmup)


def interleaved(name: str, pp: int, microbatches: int, virtual: int, instead: str) -> Loop:
    require_at_least(name, 1, pp=pp, microbatches=microbatches)
    require_virtual_stages(name, virtual, instead)
    note_bubble(name, pp, microbatches)
    return Loop(pp, microbatches, virtual, microbatches_per_round(name, pp, microbatches))


def alternate(forwards: list[Action], backwards: list[list[Action]], warmup: int) -> Row:
    """`warmup` forwards, then one forward and one backward in turn, then the other backwards."""
    ahead = min(warmup, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = chain.from_iterable((forward, *backward) for forward, backward in pairs)
    cooldown = chain.from_iterable(backwards[len(forwards) - ahead :])
    return row_of(chain(forwards[:ahead], steady, cooldown))
