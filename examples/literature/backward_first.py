"""The order that Chimera and Hanayo share, for any placement of stages on ranks.

A rank runs a backward as soon as one is ready, else the forward that is deepest in the model. Stage
0 starts no more microbatches than may be in flight. A backward takes twice as long as a forward.
"""

from math import inf

from piper.names import B, F
from piper.strategies import Action, Table


def backward_first(ranks: list[int], microbatches: int, in_flight: int) -> Table:
    """`ranks[s]` is the rank of stage s."""
    last, rows = len(ranks) - 1, [[] for _ in range(max(ranks) + 1)]
    free, done = [0] * len(rows), {}
    todo = [Action(s, p, k) for s in range(last + 1) for k in range(microbatches) for p in (F, B)]

    def needs(stage, phase, k):
        if phase is B:
            return Action(stage + 1, B, k) if stage < last else Action(stage, F, k)
        return Action(stage - 1, F, k) if stage else Action(0, B, k - in_flight)

    def ready_at(action):
        return -1 if needs(*action).microbatch < 0 else done.get(needs(*action), inf)

    now = 0
    while todo:
        for rank, row in enumerate(rows):
            ready = [a for a in todo if ranks[a.stage] == rank and ready_at(a) <= now]
            if ready and free[rank] <= now:
                best = min(ready, key=lambda a: (a.phase is F, -a.stage if a.phase is F else 0, a))
                todo.remove(best)
                row.append((best,))
                free[rank] = done[best] = now + (1 if best.phase is F else 2)
        now += 1
    return Table(tuple(map(tuple, rows)))
