"""Random operators from a counter: the same numbers for the same samples under every strategy.

Each takes what it is like (or the seed itself), the seed, and its number among the random operators
of the model. All but `bits` are made of other operators: autograd and compilers see through them.
"""

from collections.abc import Callable, Sequence
from math import pi, prod
from typing import Any

import torch
from torch import Tensor

from piper.capture.kernels.dropout import DROPOUTS, KEEP, noise
from piper.capture.kernels.dropout import INSIDE as INSIDE_DROPOUT
from piper.capture.torch_private import safe_softmax

SECOND = 2**20  # added to the number of an operator that draws twice; models have fewer operators
_APART = 2**21  # added to all numbers, so that they are not those of dropouts
_library = torch.library.Library("piper", "FRAGMENT")


def bits(random: Tensor, operation: int, shape: Sequence[int]) -> Tensor:
    """Random integers of 24 bits. Rows are counted as in `dropout_mask`."""
    rows, columns = shape[0] if shape else 1, prod(shape[1:])
    row = torch.arange(rows, device=random.device)
    column = torch.arange(columns, device=random.device)
    number = random[3] + operation + _APART
    return (noise(random[:3], number, rows, row, column) >> 8).reshape(shape)


def _bits_fake(random: Tensor, operation: int, shape: Sequence[int]) -> Tensor:
    return random.new_empty(shape)


_library.define("bits(Tensor random, int operation, SymInt[] shape) -> Tensor")
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


def uniform(random: Tensor, operation: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1), of which float32 holds each exactly."""
    wide = dtype if dtype == torch.float64 else torch.float32
    return (BITS(random, operation, shape).to(wide) * 2.0**-24).to(dtype)


def normal(random: Tensor, operation: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Box and Muller: a normal number from two uniform ones."""
    wide = dtype if dtype == torch.float64 else torch.float32
    radius = 1.0 - uniform(random, operation, shape, wide)  # not 0
    angle = uniform(random, operation + SECOND, shape, wide)
    return ((-2.0 * radius.log()).sqrt() * torch.cos(2.0 * pi * angle)).to(dtype)


def _defined(schema: str, function: Callable[..., Tensor]) -> Any:
    """An operator of `x`, `random` and `operation`, and of what the schema adds."""
    name, _, rest = schema.partition("(")
    _library.define(f"{name}(Tensor x, Tensor random, int operation{rest} -> Tensor")
    _library.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.piper, name).default


def _rand(x: Tensor, random: Tensor, operation: int, shape: Sequence[int], dtype: Any) -> Tensor:
    return uniform(random, operation, shape, dtype)


def _randn(x: Tensor, random: Tensor, operation: int, shape: Sequence[int], dtype: Any) -> Tensor:
    return normal(random, operation, shape, dtype)


def _randint(
    x: Tensor, random: Tensor, operation: int, low: int, high: int, shape: Sequence[int], dtype: Any
) -> Tensor:
    drawn = uniform(random, operation, shape, torch.float64)
    return (low + (drawn * (high - low)).floor()).to(dtype)


def _randperm(x: Tensor, random: Tensor, operation: int, n: int, dtype: Any) -> Tensor:
    return BITS(random, operation, [1, n])[0].argsort(stable=True).to(dtype)


def _between(x: Tensor, random: Tensor, operation: int, low: float, high: float) -> Tensor:
    return low + uniform(random, operation, x.shape, x.dtype) * (high - low)


def _normal_like(x: Tensor, random: Tensor, operation: int, mean: float, std: float) -> Tensor:
    return mean + normal(random, operation, x.shape, x.dtype) * std


def _exponential(x: Tensor, random: Tensor, operation: int, rate: float) -> Tensor:
    drawn = 1.0 - uniform(random, operation, x.shape, x.dtype)  # not 0
    return (-drawn.log()).clamp(min=2.0**-25) / rate  # users take its logarithm


def _bernoulli(x: Tensor, random: Tensor, operation: int) -> Tensor:
    return (uniform(random, operation, x.shape, x.dtype) < x).to(x.dtype)


def _coin(x: Tensor, random: Tensor, operation: int, p: float) -> Tensor:
    return (uniform(random, operation, x.shape, torch.float32) < p).to(x.dtype)


def _multinomial(
    x: Tensor, random: Tensor, operation: int, samples: int, replacement: bool
) -> Tensor:
    """With replacement, from the cumulative weights; without, the first of exponential clocks."""
    weights = x.detach().double()
    if replacement:
        edges = weights.cumsum(-1)
        drawn = uniform(random, operation, [*x.shape[:-1], samples], torch.float64)
        found = torch.searchsorted(edges, drawn * edges[..., -1:], right=True)
        return found.clamp(max=x.shape[-1] - 1)
    drawn = 1.0 - uniform(random, operation, x.shape, torch.float64)
    return (weights / -drawn.log().clamp(max=-1e-30)).topk(samples, -1).indices


def _feature_dropout(x: Tensor, random: Tensor, operation: int, p: float) -> Tensor:
    """Drops whole channels."""
    if p >= 1.0:
        return x * 0.0
    shape = [*x.shape[:2], *[1] * (x.dim() - 2)]
    return x * KEEP(random, operation, shape, p) * (1.0 / (1.0 - p))


def _alpha_dropout(x: Tensor, random: Tensor, operation: int, p: float, channels: bool) -> Tensor:
    """Keeps mean and variance of self-normalising networks, as torch defines it."""
    if p >= 1.0:
        return x * 0.0
    alpha = 1.7580993408473766
    a = ((alpha**2 * p + 1.0) * (1.0 - p)) ** -0.5
    shape = [*x.shape[:2], *[1] * (x.dim() - 2)] if channels else x.shape
    kept = KEEP(random, operation, shape, p).to(x.dtype)
    return x * (kept * a) + (kept - 1.0) * (alpha * a) + alpha * a * p


def _leaky(x: Tensor, random: Tensor, operation: int, lower: float, upper: float) -> Tensor:
    slope = lower + uniform(random, operation, x.shape, x.dtype) * (upper - lower)
    return torch.where(x > 0, x, x * slope)  # at 0, its gradient is the slope


def _attention(
    x: Tensor, random: Tensor, operation: int, key: Tensor, value: Tensor, mask: Tensor | None,
    p: float, causal: bool, scale: float | None, grouped: bool,
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
    return torch.ops.piper.dropout(weights, random, operation, p) @ value


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
