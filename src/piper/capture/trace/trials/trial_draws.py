"""Random numbers of trials: a microbatch has those that its rows have in the whole batch.

They are all the same, or mixed: what a mask chooses that a model draws depends on them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from piper.capture.torch_private import named_arguments

Shape = tuple[int, ...]
Given = dict[str, Any]  # arguments of an operator, by name
ONES = frozenset({"bernoulli", "bernoulli_"})
DRAWS = frozenset({
    "cauchy", "cauchy_", "exponential", "exponential_", "geometric", "geometric_", "log_normal",
    "log_normal_", "multinomial", "normal", "normal_", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random", "random_", "uniform", "uniform_",
    "_standard_gamma", "_sample_dirichlet", "binomial", *ONES,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one call draws. `bits`: its numbers are 0 or 1, as those of dropout are."""

    shape: Shape
    bits: bool

    @staticmethod
    def of(operator: Any, found: Tensor) -> "Drawn":
        return Drawn(tuple(found.shape), operator.overloadpacket.__name__ in ONES)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a microbatch draws at one place, and along which dimension the whole batch draws more.

    None: all rows share it. `known`: otherwise, how its rows are those of the whole is not known.
    """

    shape: Shape
    dim: int | None
    known: bool = True


def layouts(
    whole: Sequence[Drawn], one: Sequence[Drawn], other: Sequence[Drawn], times: int
) -> tuple[Layout, ...]:
    """Of all draws, from those in the runs of a whole batch and of two microbatches.

    None are known if their number differs, as in a loop over rows.
    """
    if not len(whole) == len(one) == len(other):
        return ()
    every = zip(whole, one, other, strict=True)
    return tuple(_layout(a.shape, b.shape, c.shape, times) for a, b, c in every)


def _layout(whole: Shape, one: Shape, other: Shape, times: int) -> Layout:
    if whole == one == other:
        return Layout(one, None)
    same = one == other and len(whole) == len(one)
    grows = [dim for dim in range(len(one)) if whole[dim] != one[dim]] if same else []
    known = len(grows) == 1 and whole[grows[0]] == times * one[grows[0]]
    return Layout(one, grows[0] if known else None, known)


class Kind(Enum):
    """How random numbers are mixed. Extreme: a third near one end, and a third near the other."""

    PLAIN = 0
    EXTREME = 1
    EXTREME_ROWS = 2  # all numbers of a row are of the same third


class SameNumbers:
    """Numbers that do not depend on how many there are."""

    def drawn(self, k: int, operator: Any, args: Any, kwargs: Any, found: Tensor) -> Tensor:
        """In place of what call number `k` found."""
        is_one = operator.overloadpacket.__name__ in ONES
        return found.fill_(1 if is_one else 0.5 if found.is_floating_point() else 0)


@dataclass(frozen=True, slots=True)
class MixedNumbers:
    """Different ones beside each other, such that thresholds have both sides.

    `part`: one of the two microbatches; None: the whole, which has them in turn, so many `times`.
    `minor`: draws of these sizes, where several elements belong to one of so many `rows`, as those
    of heads do, have all rows for the first of them, then for the next.
    """

    layouts: tuple[Layout, ...]
    part: int | None
    times: int
    seed: int
    kind: Kind
    minor: frozenset[Shape]
    rows: int

    def drawn(self, k: int, operator: Any, args: Any, kwargs: Any, found: Tensor) -> Tensor:
        if self.layouts[k] != self._expected(k, found.shape):
            raise ValueError("draws of other sizes")  # as those of selected rows: there is no trial
        name, given = operator.overloadpacket.__name__, named_arguments(operator, args, kwargs)
        if name not in MADE or not self.layouts[k].known:
            return SameNumbers().drawn(k, operator, args, kwargs, found)
        noise = self._noise(k, _noise_shape(name, given, found))
        return found.copy_(MADE[name](given, noise))

    def _expected(self, k: int, shape: Shape) -> Layout:
        dim, known = self.layouts[k].dim, self.layouts[k].known
        if not known:
            return self.layouts[k]
        return Layout(self._of_part(shape, dim), dim)

    def _of_part(self, shape: Shape, dim: int | None) -> Shape:
        if self.part is not None or dim is None:
            return tuple(shape)
        return *shape[:dim], shape[dim] // self.times, *shape[dim + 1 :]

    def _noise(self, k: int, shape: Shape) -> Tensor:
        dim = self.layouts[k].dim
        if dim is None or self.part is not None:
            return self._made(k, 0 if dim is None else self.part or 0, shape)
        pair = [self._made(k, part, self._of_part(shape, dim)) for part in (0, 1)]
        turns = [pair[turn % 2] for turn in range(self.times)]
        if self.layouts[k].shape not in self.minor or pair[0].shape[dim] % self.rows:
            return torch.cat(turns, dim)
        apart = [one.unflatten(dim, (-1, self.rows)) for one in turns]
        return torch.cat(apart, dim + 1).flatten(dim, dim + 1)

    def _made(self, k: int, part: int, shape: Shape) -> Tensor:
        """Between 0 and 1."""
        generator = torch.Generator().manual_seed((self.seed * 10_007 + k) * 2 + part)
        plain = torch.rand(shape, generator=generator, dtype=torch.float64)
        if self.kind is Kind.PLAIN:
            return plain.clamp(min=1e-9)
        dim, thirds = self.layouts[k].dim, shape
        if self.kind is Kind.EXTREME_ROWS and dim is not None:
            thirds = tuple(size if d == dim else 1 for d, size in enumerate(shape))
        third = torch.randint(3, thirds, generator=generator)
        small = 10 ** (-2 - 3 * plain)
        return torch.where(third == 0, small, torch.where(third == 1, 1 - small, plain))


Numbers = SameNumbers | MixedNumbers


def _noise_shape(name: str, given: Given, found: Tensor) -> Shape:
    """One uniform number for each of what is drawn; for a category, one for each of them."""
    if name != "multinomial":
        return tuple(found.shape)
    weights = tuple(given["self"].shape)
    return (*found.shape, weights[-1]) if given.get("replacement", False) else weights


# What operators of torch make of uniform numbers


def _uniform(given: Given, noise: Tensor) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return low + noise * (high - low)


def _normal(given: Given, noise: Tensor) -> Tensor:
    return given.get("mean", 0.0) + given.get("std", 1.0) * torch.special.ndtri(noise)


def _standard_normal(given: Given, noise: Tensor) -> Tensor:
    return torch.special.ndtri(noise)


def _bernoulli(given: Given, noise: Tensor) -> Tensor:
    return (noise < given.get("p", given["self"])).to(noise.dtype)


def _coin(given: Given, noise: Tensor) -> Tensor:
    return (noise < given.get("p", 0.5)).to(noise.dtype)


def _exponential(given: Given, noise: Tensor) -> Tensor:
    return -torch.log1p(-noise) / given.get("lambd", 1.0)


def _integers(given: Given, noise: Tensor) -> Tensor:
    low, high = given.get("low", 0), given["high"]
    return low + (noise * (high - low)).floor()


def _multinomial(given: Given, noise: Tensor) -> Tensor:
    """The first of exponential clocks."""
    weights = given["self"].detach().double()
    if given.get("replacement", False):
        return (weights.unsqueeze(-2) / -noise.log()).argmax(-1)
    return (weights / -noise.log()).topk(given["num_samples"], -1).indices


MADE: dict[str, Callable[[Given, Tensor], Tensor]] = {
    "rand": _uniform, "rand_like": _uniform, "uniform": _uniform, "uniform_": _uniform,
    "randn": _standard_normal, "randn_like": _standard_normal,
    "normal": _normal, "normal_": _normal, "normal_functional": _normal,
    "bernoulli": _bernoulli, "bernoulli_": _coin,
    "exponential": _exponential, "exponential_": _exponential,
    "randint": _integers, "randint_like": _integers, "multinomial": _multinomial,
}  # fmt: skip
