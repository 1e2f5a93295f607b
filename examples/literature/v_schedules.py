"""V-Min and V-Half (Qi et al., NeurIPS 2024): a third and half of the activations of 1F1B.

    piper run examples/literature/v_schedules.py -n 4

Stages go down the devices and back up. One microbatch is a building block, which says when each
device runs F and BI of its two stages; it is repeated every six units, and BW fills what is free.
The paper then moves some passes of the first and last microbatches earlier, which is left out here.
"""

from itertools import count

from train import train

import piper


def v_min(pp: int, rank: int) -> list[int]:
    """When a device runs F of its two stages, and BI of the second and the first."""
    gap = 2 * pp + (2 if pp % 3 == 0 else 0)
    return [rank, 2 * pp - 1 - rank, gap + rank, gap + 2 * pp - 1 - rank]


def v_half(pp: int, rank: int) -> list[int]:
    gap = 3 * pp - 1 + (3 if pp % 2 == 0 else 0)
    return [2 * rank, 3 * pp - 2 - rank, gap + 2 * rank, gap + 3 * pp - 1 - rank]


def row(times: list[int], pp: int, rank: int, microbatches: int) -> str:
    down, up = rank, 2 * pp - 1 - rank
    passes = zip(times, [f"{down}F", f"{up}F", f"{up}I", f"{down}I"], strict=True)
    slots = {time + 6 * k: f"{name}{k}" for time, name in passes for k in range(microbatches)}
    for time in [time for time in sorted(slots) if "I" in slots[time]]:
        free = next(later for later in count(time + 1) if later not in slots)
        slots[free] = slots[time].replace("I", "W")
    return ",".join(slots[time] for time in sorted(slots))


def strategy(times=v_min, pp: int = 4, microbatches: int = 8) -> piper.Strategy:
    rows = [row(times(pp, rank), pp, rank, microbatches) for rank in range(pp)]
    return piper.strategies.from_csv("\n".join(rows))


if __name__ == "__main__":
    train(strategy())
