"""V-Half (Qi et al., NeurIPS 2024): half of the activations of 1F1B.

    piper run examples/literature/v_half.py -n 4

Stages go down the devices and back up. `times` says when a device runs F of its two stages, and BI
of the second and the first.
"""

from building_block import repeated
from train import train


def times(pp: int, rank: int) -> list[int]:
    gap = 3 * pp - 1 + (3 if pp % 2 == 0 else 0)
    return [2 * rank, 3 * pp - 2 - rank, gap + 2 * rank, gap + 3 * pp - 1 - rank]


def strategy(pp: int = 4, microbatches: int = 8):
    return repeated(times, pp, microbatches)


if __name__ == "__main__":
    train(strategy())
