"""Which tensors of a batch have the batch as their first dimension.

Sizes alone do not say: a mask of [tokens, tokens] may have as many rows as the batch. So the model
runs with other sizes, without values. The batch can have any size, if all its tensors have the
same; the first dimension of a mask cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, count

Shape = tuple[int, ...]
CanChange = Callable[[frozenset[int]], bool]
Groups = tuple[frozenset[int], ...]
Runs = Callable[[Sequence[Shape]], bool]  # whether the model runs with inputs of these shapes
FEW = 5  # tensors of which all subsets are tried; of more, those of up to two tensors and the rest


@dataclass(frozen=True, slots=True)
class BatchDimension:
    """Groups of tensors whose first dimensions may have another size, if it is one for all of them.

    One group is the batch. With several, sizes do not say which; with none, the model takes one
    size only.
    """

    groups: Groups

    @property
    def is_clear(self) -> bool:
        return len(self.groups) == 1


def batch_dimension(shapes: Sequence[Shape], runs: Runs, other: Iterable[int]) -> BatchDimension:
    """`other`: sizes of the model's parameters, which a new size must not equal by chance."""
    sized = [k for k, shape in enumerate(shapes) if shape]
    if len(sized) < 2:
        return BatchDimension((frozenset(sized),) if sized else ())
    taken = {*other, *(size for shape in shapes for size in shape)}

    def can_change(some: frozenset[int]) -> bool:
        size = new_size(shapes[min(some)][0], taken)
        return runs([(size, *s[1:]) if k in some else s for k, s in enumerate(shapes)])

    rows: dict[int, list[int]] = {}
    for k in sized:
        rows.setdefault(shapes[k][0], []).append(k)
    return BatchDimension(tuple(g for equal in rows.values() for g in groups(equal, can_change)))


def groups(equal: Sequence[int], can_change: CanChange) -> Groups:
    """The smallest sets of these tensors, all of one first size, that can have another size.

    If all of them can change together, then with a set also those outside of it can: half of the
    sets are enough.
    """
    everything = frozenset(equal)
    if not can_change(everything):
        return smallest(proper_subsets(equal), can_change)
    found = smallest(proper_subsets(equal[1:], everything), can_change)
    return (everything.difference(*found), *found)


def smallest(sets: Iterable[frozenset[int]], can_change: CanChange) -> Groups:
    found: list[frozenset[int]] = []
    for some in sets:
        if not any(group <= some for group in found) and can_change(some):
            found.append(some)
    return tuple(found)


def proper_subsets(
    equal: Sequence[int], of: frozenset[int] | None = None
) -> Iterator[frozenset[int]]:
    """Subsets, smaller ones first, without the whole set `of`: all of them, or those of up to two
    tensors and the largest ones."""
    whole, many = of or frozenset(equal), len(equal)
    sizes = range(1, many + 1) if many <= FEW else (1, 2, many - 1, many)
    for size in sizes:
        yield from (set for set in map(frozenset, combinations(equal, size)) if set != whole)


def new_size(size: int, taken: set[int]) -> int:
    """The next prime number that no dimension has. Its multiples are not reshaped by chance.

    >>> new_size(8, {8, 11, 16})
    13
    """
    return next(n for n in count(size + 1) if n > 2 and n not in taken and is_prime(n))


def is_prime(number: int) -> bool:
    return all(number % k for k in range(2, int(number**0.5) + 1))
