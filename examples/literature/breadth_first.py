"""Breadth-first pipeline parallelism (Lamy-Poirier, MLSys 2023), with fully sharded replicas.

    piper run examples/literature/breadth_first.py -n 4

A device runs all microbatches of one of its stages before any of the next. So ZeRO-3 gathers the
parameters of a stage once for all forwards and once for all backwards. This takes a buffer for each
of its layers.
"""

from train import train

import piper


def strategy(pp=2, virtual=2, dp=2, microbatches=4, layers=2) -> piper.Strategy:
    """`layers`: of each stage."""
    stages, parts = range(pp * virtual), range(microbatches)
    rows = [
        [f"{s}F{k}" for s in stages[rank::pp] for k in parts]
        + [f"{s}B{k}" for s in reversed(stages[rank::pp]) for k in parts]
        for rank in range(pp)
    ]
    text = "\n".join(map(",".join, rows))
    return piper.strategies.from_csv(text, dp=dp, zero=3, reduce="once", gather_buffers=layers)


if __name__ == "__main__":
    train(strategy())
