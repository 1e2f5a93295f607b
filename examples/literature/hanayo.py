"""Hanayo (Liu et al., SC 2023): stages go down and up the devices in waves.

    piper run examples/literature/hanayo.py -n 2

Each wave passes every device twice: 2 * pp stages, of which neighbours at a turn need no message.
More waves make the bubble smaller: (2P - 2) / (3PW + P - 1) with as many microbatches as devices.
With more, the order is the fastest of several limits on the microbatches in flight.
"""

from backward_first import backward_first
from train import train

import piper
from piper.strategies.timing import step_length


def strategy(pp: int = 2, waves: int = 2, microbatches: int = 4) -> piper.Strategy:
    stages = [*range(pp), *reversed(range(pp))] * waves  # 0, 1, ..., 1, 0, 0, 1, ...
    limits = range(pp, 2 * pp + 2)
    tables = (backward_first(stages, microbatches, in_flight) for in_flight in limits)
    return piper.strategies.from_table(min(tables, key=step_length))


if __name__ == "__main__":
    train(strategy())
