"""Hanayo (Liu et al., SC 2023): stages go down and up the devices in waves.

    piper run examples/literature/hanayo.py -n 2

Each wave passes every device twice, so a device has two stages of each wave, and neighbours at a
turn of the wave need no message. More waves make the bubble smaller. No weights are duplicated.
"""

from backward_first import backward_first
from train import train

import piper


def strategy(pp: int = 2, waves: int = 2, microbatches: int = 4) -> piper.Strategy:
    wave = [*range(pp), *reversed(range(pp))]  # 0, 1, ..., 1, 0
    return piper.strategies.from_table(backward_first(wave * waves, microbatches, in_flight=2 * pp))


if __name__ == "__main__":
    train(strategy())
