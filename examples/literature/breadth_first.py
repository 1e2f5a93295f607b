"""Breadth-first pipeline parallelism (Lamy-Poirier, MLSys 2023), with fully sharded replicas.

    piper run examples/literature/breadth_first.py -n 4

A device runs all microbatches of one of its stages before any of the next. So ZeRO-3 gathers the
parameters of a stage once for all forwards and once for all backwards. This takes a buffer for each
of its layers.
"""

from rows import from_rows, passes
from train import train


def strategy(pp=2, virtual=2, dp=2, microbatches=4, layers=2):
    """`layers`: of each stage."""
    parts, own = range(microbatches), [range(rank, pp * virtual, pp) for rank in range(pp)]
    rows = [passes("F", one, parts) + passes("B", reversed(one), parts) for one in own]
    return from_rows(rows, dp=dp, zero=3, reduce="once", gather_buffers=layers)


if __name__ == "__main__":
    train(strategy())
