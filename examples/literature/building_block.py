"""Schedules of Qi et al. (NeurIPS 2024): one microbatch is a building block, repeated every six
units, and BW fills what is free.

The paper then moves some passes of the first and last microbatches earlier, which is left out here.
"""

from itertools import count

from rows import from_rows


def row(times: list[int], pp: int, rank: int, microbatches: int) -> list[str]:
    down, up = rank, 2 * pp - 1 - rank
    passes = zip(times, [f"{down}F", f"{up}F", f"{up}I", f"{down}I"], strict=True)
    slots = {time + 6 * k: f"{name}{k}" for time, name in passes for k in range(microbatches)}
    for time in [time for time in sorted(slots) if "I" in slots[time]]:
        free = next(later for later in count(time + 1) if later not in slots)
        slots[free] = slots[time].replace("I", "W")
    return [slots[time] for time in sorted(slots)]


def repeated(times, pp: int, microbatches: int):
    return from_rows(row(times(pp, rank), pp, rank, microbatches) for rank in range(pp))
