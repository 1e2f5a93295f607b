"""Random operators from a counter: the same numbers for the same samples under every strategy.

Each takes what it is like (or the seed itself), the seed, and its number among the random operators
of the model. All but `bits` are made of other operators: autograd and compilers see through them.
"""

from collections.abc import Callable, Sequence
from math import pi
from typing import Any

import torch
from torch import Tensor

from piper.capture.kernels.dropout import DROPOUTS, FIRST, KEEP, ROWS, Rows, noise_of, seed_of
from piper.capture.kernels.dropout import INSIDE as INSIDE_DROPOUT
from piper.capture.torch_private import safe_softmax

SECOND = 2**20  # added to the number of an operator that draws twice; models have fewer operators
_APART = 2**21  # added to all numbers, so that they are not those of dropouts
_library = torch.library.Library("piper", "FRAGMENT")


def bits(random: Tensor, operation: int, shape: Sequence[int], rows: Rows = FIRST) -> Tensor:
    """Random integers of 24 bits. Rows are counted as in `dropout_mask`."""
    return noise_of(random[:3], random[3] + operation + _APART, shape, rows) >> 8


def _bits_fake(random: Tensor, operation: int, shape: Sequence[int], rows: Rows = FIRST) -> Tensor:
    return random.new_empty(shape)


_library.define(f"bits(Tensor random, int operation, SymInt[] shape, {ROWS}) -> Tensor")
_library.impl("bits", bits, "CompositeExplicitAutograd")
_library.impl("bits", _bits_fake, "Meta")
BITS = torch.ops.piper.bits.default


def once(random: Tensor) -> Tensor:
    """The seed for numbers that are the same in all microbatches of a step."""
    seed = random[:1]
    return torch.cat([seed, torch.zeros_like(seed), torch.ones_like(seed), random[3:]])


_library.define("once(Tensor random) -> Tensor")
_library.impl("once", once, "CompositeImplicitAutograd")
ONCE = torch.ops.piper.once.default


def of_row(random: Tensor, row: int, rows: int) -> Tensor:
    """The seed for numbers of one row of a microbatch that has so many."""
    seed, before, size, number = random.unbind()
    return torch.stack([seed_of(seed, before * rows // size + row), *once(random)[1:3], number])


_library.define("of_row(Tensor random, int row, int rows) -> Tensor")
_library.impl("of_row", of_row, "CompositeImplicitAutograd")
OF_ROW = torch.ops.piper.of_row.default


def uniform(
    random: Tensor, operation: int, shape: Sequence[int], dtype: torch.dtype, rows: Rows = FIRST
) -> Tensor:
    """Numbers in [0, 1), of which float32 holds each exactly."""
    wide = dtype if dtype == torch.float64 else torch.float32
    return (BITS(random, operation, shape, rows).to(wide) * 2.0**-24).to(dtype)


def normal(
    random: Tensor, operation: int, shape: Sequence[int], dtype: torch.dtype, rows: Rows = FIRST
) -> Tensor:
    """Box and Muller: a normal number from two uniform ones."""
    wide = dtype if dtype == torch.float64 else torch.float32
    radius = 1.0 - uniform(random, operation, shape, wide, rows)  # not 0
    angle = uniform(random, operation + SECOND, shape, wide, rows)
    return ((-2.0 * radius.log()).sqrt() * torch.cos(2.0 * pi * angle)).to(dtype)


def _defined(schema: str, function: Callable[..., Tensor]) -> Any:
    """An operator of `x`, `random`, `operation`, what the schema adds, and where rows are."""
    name, _, rest = schema.removesuffix(")").partition("(")
    _library.define(f"{name}(Tensor x, Tensor random, int operation{rest}, {ROWS}) -> Tensor")
    _library.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.piper, name).default


def _rand(
    x: Tensor, random: Tensor, operation: int, shape: Sequence[int], dtype: Any, rows: Rows = FIRST
) -> Tensor:
    return uniform(random, operation, shape, dtype, rows)


def _randn(
    x: Tensor, random: Tensor, operation: int, shape: Sequence[int], dtype: Any, rows: Rows = FIRST
) -> Tensor:
    return normal(random, operation, shape, dtype, rows)


def _randint(
    x: Tensor, random: Tensor, operation: int, low: int, high: int, shape: Sequence[int],
    dtype: Any, rows: Rows = FIRST,
) -> Tensor:  # fmt: skip
    drawn = uniform(random, operation, shape, torch.float64, rows)
    return (low + (drawn * (high - low)).floor()).to(dtype)


def _randperm(
    x: Tensor, random: Tensor, operation: int, n: int, dtype: Any, rows: Rows = FIRST
) -> Tensor:
    return BITS(random, operation, [1, n])[0].argsort(stable=True).to(dtype)


def _between(
    x: Tensor, random: Tensor, operation: int, low: float, high: float, rows: Rows = FIRST
) -> Tensor:
    return low + uniform(random, operation, x.shape, x.dtype, rows) * (high - low)


def _normal_like(
    x: Tensor, random: Tensor, operation: int, mean: float, std: float, rows: Rows = FIRST
) -> Tensor:
    return mean + normal(random, operation, x.shape, x.dtype, rows) * std


def _exponential(
    x: Tensor, random: Tensor, operation: int, rate: float, rows: Rows = FIRST
) -> Tensor:
    drawn = 1.0 - uniform(random, operation, x.shape, x.dtype, rows)  # not 0
    return (-drawn.log()).clamp(min=2.0**-25) / rate  # users take its logarithm


def _bernoulli(x: Tensor, random: Tensor, operation: int, rows: Rows = FIRST) -> Tensor:
    return (uniform(random, operation, x.shape, x.dtype, rows) < x).to(x.dtype)


def _coin(x: Tensor, random: Tensor, operation: int, p: float, rows: Rows = FIRST) -> Tensor:
    return (uniform(random, operation, x.shape, torch.float32, rows) < p).to(x.dtype)


def _multinomial(
    x: Tensor, random: Tensor, operation: int, samples: int, replacement: bool, rows: Rows = FIRST
) -> Tensor:
    """With replacement, from the cumulative weights; without, the first of exponential clocks."""
    weights = x.detach().double()
    if replacement:
        edges = weights.cumsum(-1)
        drawn = uniform(random, operation, [*x.shape[:-1], samples], torch.float64, rows)
        found = torch.searchsorted(edges, drawn * edges[..., -1:], right=True)
        return found.clamp(max=x.shape[-1] - 1)
    drawn = 1.0 - uniform(random, operation, x.shape, torch.float64, rows)
    return (weights / -drawn.log().clamp(max=-1e-30)).topk(samples, -1).indices


def _feature_dropout(
    x: Tensor, random: Tensor, operation: int, p: float, rows: Rows = FIRST
) -> Tensor:
    """Drops whole channels."""
    if p >= 1.0:
        return x * 0.0
    shape = [*x.shape[:2], *[1] * (x.dim() - 2)]
    return x * KEEP(random, operation, shape, p, rows) * (1.0 / (1.0 - p))


def _alpha_dropout(
    x: Tensor, random: Tensor, operation: int, p: float, channels: bool, rows: Rows = FIRST
) -> Tensor:
    """Keeps mean and variance of self-normalising networks, as torch defines it."""
    if p >= 1.0:
        return x * 0.0
    alpha = 1.7580993408473766
    a = ((alpha**2 * p + 1.0) * (1.0 - p)) ** -0.5
    shape = [*x.shape[:2], *[1] * (x.dim() - 2)] if channels else x.shape
    kept = KEEP(random, operation, shape, p, rows).to(x.dtype)
    return x * (kept * a) + (kept - 1.0) * (alpha * a) + alpha * a * p


def _leaky(
    x: Tensor, random: Tensor, operation: int, lower: float, upper: float, rows: Rows = FIRST
) -> Tensor:
    slope = lower + uniform(random, operation, x.shape, x.dtype, rows) * (upper - lower)
    return torch.where(x > 0, x, x * slope)  # at 0, its gradient is the slope


def _attention(
    x: Tensor, random: Tensor, operation: int, key: Tensor, value: Tensor, mask: Tensor | None,
    p: float, causal: bool, scale: float | None, grouped: bool, rows: Rows = FIRST,
) -> Tensor:  # fmt: skip
    """Attention with dropout on its weights, which needs them as a tensor."""
    if grouped:
        key = key.repeat_interleave(x.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(x.shape[-3] // value.shape[-3], -3)
    scale = x.shape[-1] ** -0.5 if scale is None else scale
    scores = (x * scale) @ key.transpose(-2, -1)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    weights = safe_softmax(scores, -1)
    return torch.ops.piper.dropout(weights, random, operation, p, rows) @ value


RAND = _defined("rand(, SymInt[] shape, ScalarType dtype)", _rand)
RANDN = _defined("randn(, SymInt[] shape, ScalarType dtype)", _randn)
RANDINT = _defined("randint(, int low, int high, SymInt[] shape, ScalarType dtype)", _randint)
RANDPERM = _defined("randperm(, int n, ScalarType dtype)", _randperm)
BETWEEN = _defined("between(, float low, float high)", _between)
NORMAL_LIKE = _defined("normal_like(, float mean, float std)", _normal_like)
EXPONENTIAL = _defined("exponential(, float rate)", _exponential)
BERNOULLI = _defined("bernoulli()", _bernoulli)
COIN = _defined("coin(, float p)", _coin)
MULTINOMIAL = _defined("multinomial(, int samples, bool replacement)", _multinomial)
FEATURE_DROPOUT = _defined("feature_dropout(, float p)", _feature_dropout)
ALPHA_DROPOUT = _defined("alpha_dropout(, float p, bool channels)", _alpha_dropout)
LEAKY = _defined("leaky(, float lower, float upper)", _leaky)
ATTENTION = _defined(
    "attention(, Tensor key, Tensor value, Tensor? mask, float p, bool causal, float? scale, "
    "bool grouped)",
    _attention,
)
RANDOM_OPERATORS = (
    *DROPOUTS, RAND, RANDN, RANDINT, RANDPERM, BETWEEN, NORMAL_LIKE, EXPONENTIAL, BERNOULLI, COIN,
    MULTINOMIAL, FEATURE_DROPOUT, ALPHA_DROPOUT, LEAKY, ATTENTION,
)  # fmt: skip
INSIDE: dict[Any, Callable[..., Tensor]] = {**INSIDE_DROPOUT, BITS: bits}  # for a compiler
