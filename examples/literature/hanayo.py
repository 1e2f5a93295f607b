"""Hanayo (Liu et al., SC 2023): stages go down and up the devices in waves.

    piper run examples/literature/hanayo.py -n 2

A device takes turns between its stages on the way up and down, where it is pp - rank passes ahead,
as in public code (W = 1, 2, 4). It idles 4P - 4 steps, below the paper's (2P - 2) / (3PW + P - 1).
"""

from rows import from_rows, in_turn, passes
from train import train


def row(rank: int, pp: int, waves: int, parts: range) -> list[str]:
    stages = [s for w in range(waves) for s in (2 * pp * w + rank, 2 * pp * (w + 1) - 1 - rank)]
    down = passes("F", stages[::2], parts) + passes("B", stages[::-2], parts)
    up = passes("F", stages[1::2], parts) + passes("B", stages[-2::-2], parts)
    return down[: pp - rank] + in_turn(up, down[pp - rank :])


def strategy(pp: int = 2, waves: int = 2, microbatches: int = 4):
    return from_rows(row(rank, pp, waves, range(microbatches)) for rank in range(pp))


if __name__ == "__main__":
    train(strategy())
