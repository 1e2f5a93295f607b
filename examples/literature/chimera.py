"""Chimera (Li and Hoefler, SC 2021): two replicas go through the devices in opposite directions.

    piper run examples/literature/chimera.py -n 4

Stage s is on devices s and pp - 1 - s. The replicas share a batch, half each. Each fills bubbles of
the other: both run the same row, one from each end, which is one wave of Hanayo.
"""

import hanayo
from train import train

from piper import Replicate, Strategy, strategies, where


def strategy(pp: int = 4) -> Strategy:
    """The basic unit of the paper: half as many microbatches in each direction as stages."""
    table = strategies.to_table(hanayo.strategy(pp // 2, waves=1, microbatches=pp // 2))
    homes = {stage: (stage, pp - 1 - stage) for stage in range(pp)}
    replicas = [Replicate(where(PP=stage), home) for stage, home in homes.items()]
    return Strategy([*strategies.to_directives(table, homes), *replicas])


if __name__ == "__main__":
    train(strategy())
