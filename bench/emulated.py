"""A language model with experts on an emulated device: real shapes and gradients, chosen times.

Four ranks on two cores cannot multiply matrices side by side. So the large products here do a
little real arithmetic (on the first `WIDTH` columns; the others pass through), and then sleep for
the time they would take on their own device. Communication is real, and messages have their real
size. Input and weight gradients are separate operators, each as long as the forward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

import piper
from piper.models.grouped import combine, sort_by_expert
from piper.models.llama import cross_entropy

__all__ = ["DEVICE", "Config", "Experts", "Mixture", "Staged", "batch", "cross_entropy"]
WIDTH = 8  # columns with real arithmetic
FLOPS = 2e10  # per second, of the emulated device: the default of Piper's costs
LONG = 5e-2  # longer work between two products is not part of a step: capture, compilation
TINY = 1e-4  # shorter sleeps are not worth their overhead


class Device:
    """A device that runs one product at a time, each for its given time.

    The times cover whole layers. Real work of the thread since its last product (routing, sorting,
    dispatch) counts as part of the next product's time, as on a device whose host runs ahead.
    """

    def __init__(self) -> None:
        self.spent = 0.0  # emulated seconds of compute so far
        self.debt = 0.0  # how far we are behind: the next products are shorter
        self.thread = threading.local()

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        worked = time.thread_time()
        since = worked - getattr(self.thread, "worked", worked)
        self.debt += since if since < LONG else 0.0
        end = time.perf_counter() + seconds - self.debt
        self.spent += seconds
        yield
        left = end - time.perf_counter()
        if left > TINY:
            time.sleep(left)
        self.debt = time.perf_counter() - end
        self.thread.worked = time.thread_time()

    def restart(self) -> None:
        """Forget all time before now."""
        self.debt = 0.0
        self.thread = threading.local()


DEVICE = Device()


def copied(x: Tensor, width: int) -> Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    result[:, width:] = x[:, width:]
    return result


@torch.library.custom_op("bench::slow_mm", mutates_args=())
def slow_mm(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """x [T, d], weight [w, w] -> [T, d], in `seconds` for each row."""
    with DEVICE.busy(x.shape[0] * seconds):
        result = copied(x, WIDTH)
        torch.mm(x[:, :WIDTH], weight, out=result[:, :WIDTH])
    return result


@torch.library.custom_op("bench::slow_mm_weight", mutates_args=())
def slow_mm_weight(x: Tensor, grad: Tensor, seconds: float) -> Tensor:
    with DEVICE.busy(x.shape[0] * seconds):
        return x[:, :WIDTH].t() @ grad[:, :WIDTH]


@torch.library.custom_op("bench::slow_grouped", mutates_args=())
def slow_grouped(rows: Tensor, weight: Tensor, counts: Tensor, seconds: float) -> Tensor:
    """rows [T, d] sorted by expert, weight [E, w, w], counts [E] -> [T, d]."""
    with DEVICE.busy(rows.shape[0] * seconds):
        result = copied(rows, WIDTH)
        sizes = counts.tolist()
        for some, matrix, out in zip(
            rows.split(sizes), weight.unbind(), result.split(sizes), strict=True
        ):
            torch.mm(some[:, :WIDTH], matrix, out=out[:, :WIDTH])
    return result


@torch.library.custom_op("bench::slow_grouped_weight", mutates_args=())
def slow_grouped_weight(rows: Tensor, grad: Tensor, counts: Tensor, seconds: float) -> Tensor:
    with DEVICE.busy(rows.shape[0] * seconds):
        sizes = counts.tolist()
        pairs = zip(rows[:, :WIDTH].split(sizes), grad[:, :WIDTH].split(sizes), strict=True)
        return torch.stack([some.t() @ grads for some, grads in pairs])


@slow_mm.register_fake
def _(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return x.new_empty(x.shape)


@slow_mm_weight.register_fake
def _(x: Tensor, grad: Tensor, seconds: float) -> Tensor:
    return x.new_empty(WIDTH, WIDTH)


@slow_grouped.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor, seconds: float) -> Tensor:
    return rows.new_empty(rows.shape)


@slow_grouped_weight.register_fake
def _(rows: Tensor, grad: Tensor, counts: Tensor, seconds: float) -> Tensor:
    return rows.new_empty(counts.shape[0], WIDTH, WIDTH)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.seconds = inputs
    ctx.save_for_backward(*tensors)


def needed(ctx: Any) -> list[bool]:
    """Which of the gradients of the first two inputs this backward computes.

    Torch's engine tells its own products. It does not tell operators in Python, which would
    compute both halves twice when a peer splits a backward.
    """
    pairs = zip(ctx.needs_input_grad[:2], ctx.next_functions[:2], strict=True)
    return [need and reached(node) for need, (node, _) in pairs]


def reached(node: Any) -> bool:
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch rejects leaves here
        return True


def _slow_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    (x, weight), seconds = ctx.saved_tensors, ctx.seconds
    need_x, need_weight = needed(ctx)
    of_x = slow_mm(grad, weight.t(), seconds) if need_x else None
    return of_x, slow_mm_weight(x, grad, seconds) if need_weight else None, None


def _slow_grouped_backward(
    ctx: Any, grad: Tensor
) -> tuple[Tensor | None, Tensor | None, None, None]:
    (rows, weight, counts), seconds = ctx.saved_tensors, ctx.seconds
    need_rows, need_weight = needed(ctx)
    of_rows = slow_grouped(grad, weight.transpose(1, 2), counts, seconds) if need_rows else None
    of_weight = slow_grouped_weight(rows, grad, counts, seconds) if need_weight else None
    return of_rows, of_weight, None, None


slow_mm.register_autograd(_slow_mm_backward, setup_context=_keep)
slow_grouped.register_autograd(_slow_grouped_backward, setup_context=_keep)


@register_flop_formula([torch.ops.bench.slow_mm, torch.ops.bench.slow_mm_weight])
def slow_mm_flops(x: Any, other: Any, seconds: float, **_: Any) -> int:
    return int(x[0] * seconds * FLOPS)


@register_flop_formula([torch.ops.bench.slow_grouped, torch.ops.bench.slow_grouped_weight])
def slow_grouped_flops(rows: Any, other: Any, counts: Any, seconds: float, **_: Any) -> int:
    return int(rows[0] * seconds * FLOPS)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes, and the time of a layer for one microbatch."""

    vocab: int = 64
    dim: int = 256  # a row has 4 * dim bytes
    time: int = 256  # tokens of a sequence; a microbatch is one sequence
    layers: int = 8
    experts: int = 8
    chosen: int = 2
    dense: float = 1e-2  # seconds of the dense part of a layer's forward, for a whole microbatch
    expert: float = 1e-2  # of its experts, for all the rows that one device sends
    uneven: bool = False

    @property
    def row_bytes(self) -> int:
        return 4 * self.dim


class Experts(nn.Module):
    """Like piper.models.qwen3_moe.Experts: sorted rows and their counts in, rows out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.seconds = config.expert / (config.time * config.chosen)
        self.weight = nn.Parameter(torch.eye(WIDTH).repeat(config.experts, 1, 1))
        with torch.no_grad():
            self.weight += 0.1 * torch.randn_like(self.weight)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return slow_grouped(rows, self.weight, counts, self.seconds)


def preferences(config: Config) -> Tensor:
    """What a router adds to its logits before it chooses: [time, experts].

    Balanced: every token goes to one expert in each half, in turn. Uneven: drawn (by Gumbel noise)
    from a Zipf distribution, with the experts in another order in every layer; the busiest expert
    has about 2.5 times the mean.
    """
    if not config.uneven:
        half = config.experts // config.chosen
        turn = torch.arange(config.time) % half
        places = turn[:, None] + half * torch.arange(config.chosen)
        return torch.zeros(config.time, config.experts).scatter(1, places, 100.0)
    share = torch.log(1.0 / (1 + torch.randperm(config.experts)))
    noise = torch.rand(config.time, config.experts).clamp(1e-6, 1 - 1e-6)
    return share - torch.log(-torch.log(noise))


class Mixture(nn.Module):
    """Router and experts. Only the experts are in the EP region."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.weigh = nn.Linear(config.dim, config.experts, bias=False)
        self.register_buffer("preferred", preferences(config))
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.weigh(x)
        expert = (logits + self.preferred).topk(self.config.chosen).indices
        score = logits.gather(-1, expert).softmax(-1)
        flat = expert.flatten(0, 1)
        rows, order, inverse = sort_by_expert(x.flatten(0, 1), flat)
        every = flat.flatten()
        none = every.new_zeros(self.config.experts)
        counts = none.scatter_add(0, every, torch.ones_like(every))
        with piper.annotate("EP"):
            rows = self.experts(rows, counts)
        return combine(rows, order, inverse, score.flatten(0, 1)).view_as(x)


class Block(nn.Module):
    """One layer. Its dense part stands for attention. Norms would only cost real time."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.seconds = config.dense / config.time
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))
        self.mixture = Mixture(config)

    def forward(self, x: Tensor) -> Tensor:
        x = slow_mm(x.flatten(0, 1), self.weight, self.seconds).view_as(x)
        return torch.lerp(x, self.mixture(x), 0.5)


class Stage(nn.Module):
    """Some layers; the first stage embeds, the last one has the head."""

    def __init__(self, config: Config, index: int, stages: int) -> None:
        super().__init__()
        last = index == stages - 1
        self.embedding = nn.Embedding(config.vocab, config.dim) if index == 0 else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers // stages))
        self.head = nn.Linear(config.dim, config.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class Staged(nn.Module):
    """The whole model, annotated. Its values do not depend on the number of stages."""

    def __init__(self, config: Config, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(Stage(config, k, stages) for k in range(stages))

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for k, stage in enumerate(self.stages):
            with piper.annotate("PP", k):
                x = stage(x)
        return x


def batch(vocab: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    cuts = torch.randint(0, vocab, (rows, length + 1), generator=generator)
    return cuts[:, :-1].contiguous(), cuts[:, 1:].contiguous()
