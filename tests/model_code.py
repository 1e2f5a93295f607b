"""Models as researchers write them: kinds of code, not of operators. Each has two stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import torch.nn.utils.prune
from torch import Tensor, nn

from piper.capture import annotate

D, T, C = 6, 4, 5  # width, time, classes
MODELS: dict[str, Callable[[], nn.Module]] = {}
LOSSES: dict[str, Callable[..., Tensor]] = {}


def model(cls: type[nn.Module]) -> type[nn.Module]:
    MODELS[cls.__name__] = cls
    return cls


def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    LOSSES[function.__name__] = function
    return function


def first() -> Any:
    return annotate("PP", 0)


def second() -> Any:
    return annotate("PP", 1)


class Base(nn.Module):
    """Logits [rows, T, C] of x [rows, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = torch.tanh(self.a(x))
        with second():
            return self.head(torch.tanh(self.b(x)))


@model
class Reused(Base):
    """One module at several depths, as in ALBERT."""

    def forward(self, x: Tensor) -> Tensor:
        with first():
            for _ in range(3):
                x = x + torch.tanh(self.a(x))
        with second():
            return self.head(torch.tanh(self.a(x) + self.b(x)))


@model
class Teacher(Base):
    """A target network without gradients, and a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(D, D).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with first():
            y = torch.tanh(self.a(x))
            with torch.no_grad():
                z = self.target(x)
            y = y + (z - y).detach()
        with second():
            return self.head(self.b(y) * torch.sigmoid(y))


@model
class Written(Base):
    """Tokens written in place: a class token, masks, accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        with first():
            y = self.a(x).clone()
            y[:, 0] = self.token
            y[:, 1:] += x[:, 1:] * 0.5
            y.relu_()
        with second():
            out = torch.zeros_like(y)
            for t in range(T):
                out[:, t] += self.b(y[:, t]) * (t + 1)
            out[y > 0.5] = 0.25
            return self.head(out)


class Named(NamedTuple):
    hidden: Tensor
    sizes: dict[str, Tensor]


@model
class Nested(Base):
    """Named tuples, dicts and keyword arguments between layers."""

    def inner(self, x: Tensor, *more: Tensor, scale: float = 1.0, **named: Tensor) -> Named:
        return Named(self.a(x) * scale, {"s": x.square().mean(-1, keepdim=True), **named})

    def forward(self, x: Tensor) -> Tensor:
        with first():
            found = self.inner(x, x, scale=0.7, extra=x.abs())
        with second():
            y = found.hidden / (1 + found.sizes["s"]) + found.sizes["extra"]
            return self.head(torch.tanh(self.b(y)))


@model
class Adapted(Base):
    """LoRA: frozen weights, two small matrices, a scale in Python."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.a, self.b):
            layer.requires_grad_(False)
        self.down = nn.ParameterDict({k: nn.Parameter(torch.randn(2, D) / 3) for k in "ab"})
        self.up = nn.ParameterDict({k: nn.Parameter(torch.randn(D, 2) / 3) for k in "ab"})
        self.alpha = {"a": 2.0, "b": 0.5}

    def lora(self, key: str, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x) + x @ self.down[key].T @ self.up[key].T * self.alpha[key]

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = torch.tanh(self.lora("a", self.a, x))
        with second():
            return self.head(torch.tanh(self.lora("b", self.b, x)))


@model
class Tied(Base):
    """A property that is a transposed weight of the other stage."""

    @property
    def back(self) -> Tensor:
        return self.a.weight.t() / 2

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = torch.tanh(self.a(x))
        with second():
            return self.head(x @ self.back + self.b(x))


@model
class Pruned(Base):
    """Masks of torch.nn.utils.prune: the weight is made before each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.prune.l1_unstructured(self.a, "weight", amount=0.4)
        torch.nn.utils.prune.random_structured(self.b, "weight", amount=0.5, dim=0)


@model
class Cached(Base):
    """Tables that are made once and kept in attributes, dicts and function caches."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}
        self.mask: Tensor | None = None

    def positions(self, n: int, like: Tensor) -> Tensor:
        if n not in self.tables:
            self.tables[n] = torch.arange(n, dtype=like.dtype, device=like.device).cos()
        return self.tables[n]

    def forward(self, x: Tensor) -> Tensor:
        with first():
            if self.mask is None:
                self.mask = torch.tril(torch.ones(T, T, dtype=x.dtype)) / ramp(T)
            x = self.mask @ self.a(x)
        with second():
            return self.head(torch.tanh(self.b(x)) * self.positions(T, x)[:, None])


@functools.lru_cache
def ramp(n: int) -> Tensor:
    return torch.linspace(1, 2, n, dtype=torch.float64)[:, None]


@model
class Exits(Base):
    """An exit after each stage. The last output is a mixture of both."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.mix = nn.Linear(D, C), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        with first():
            x = torch.tanh(self.a(x))
            outs.append(self.early(x))
        with second():
            outs.append(self.head(self.b(x)))
            weights = self.mix.softmax(0)
            return sum(w * o for w, o in zip(weights, outs, strict=True))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


@model
class Adversarial(Base):
    """Gradient reversal between the stages."""

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = Reverse.apply(torch.tanh(self.a(x)), 0.3)
        with second():
            return self.head(self.b(x))


@model
class Codebook(Base):
    """Vector quantisation with a learned codebook and a commitment term in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(7, D))

    def forward(self, x: Tensor) -> Tensor:
        with first():
            z = self.a(x)
            distance = (z.unsqueeze(-2) - self.codes).square().sum(-1)
            picked = self.codes[distance.argmin(-1)]
            q = z + (picked - z).detach()
        with second():
            commit = (z - picked.detach()).square().mean(-1, keepdim=True)
            return (
                self.head(self.b(q))
                + 0.1 * commit
                + (picked - z.detach()).square().mean((1, 2), True)
            )


@model
class Queue(Base):
    """A memory of older rows, as in MoCo: its oldest rows are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.randn(4, D))

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = torch.tanh(self.a(x))
        with second():
            y = self.b(x)
            memory = self.memory.clone()
            near = (y @ memory.T).softmax(-1) @ memory
            with torch.no_grad():
                self.memory.copy_(torch.cat([self.memory[1:], y.mean((0, 1), keepdim=False)[None]]))
            return self.head(y + near)


@model
class Pointer(Base):
    """A memory with a pointer that is a buffer, written by index."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(5, D))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = torch.tanh(self.a(x))
            if self.training:
                with torch.no_grad():
                    self.memory.index_copy_(0, self.at % 5, x.mean((0, 1))[None])
                    self.at += 1
        with second():
            return self.head(self.b(x))


@model
class Clusters(Base):
    """Centres that are moved in the forward and only reported."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.randn(3, D))
        self.register_buffer("counts", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = torch.tanh(self.a(x))
            with torch.no_grad():
                flat = x.reshape(-1, D)
                near = torch.cdist(flat, self.centres).argmin(-1)
                hot = F.one_hot(near, 3).to(x.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.centres.lerp_(hot.T @ flat / hot.sum(0).clamp(min=1)[:, None], 0.1)
        with second():
            return self.head(self.b(x))


@model
class Flagged(Base):
    """Branches on flags, types, shapes and attributes."""

    use_norm = True

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = self.a(x)
            if self.training and x.shape[1] == T and hasattr(self, "b"):
                x = F.layer_norm(x, (D,)) if self.use_norm else x
            if self.head.weight.requires_grad and isinstance(self.a, nn.Linear):
                x = x * 1.5
        with second():
            assert x.dim() == 3, f"{x.shape}"
            y = self.b(x) if torch.is_grad_enabled() else x
            return self.head(y)


@model
class Recurrent(Base):
    """A cell in a loop over time, with the state in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, D)

    def forward(self, x: Tensor) -> Tensor:
        with first():
            state, states = x.new_zeros(x.shape[0], D), []
            for step in x.transpose(0, 1):
                state = self.cell(step, state)
                states.append(state)
            x = torch.stack(states, 1)
        with second():
            return self.head(self.b(x))


@model
class TimeMajor(Base):
    """Time first, as older code has it; attention over it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        with first():
            y = self.a(x).transpose(0, 1)
            y = y + self.attention(y, y, y, need_weights=False)[0]
        with second():
            return self.head(self.b(y)).permute(1, 0, 2)


@model
class Mixture(Base):
    """Soft experts, a load-balancing term added to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 3)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with first():
            gates = self.gate(x).softmax(-1)
            top, ids = gates.topk(2, -1)
            y = torch.zeros_like(x)
            for k, expert in enumerate(self.experts):
                weight = (top * (ids == k)).sum(-1, keepdim=True)
                y = y + weight * expert(x)
        with second():
            return self.head(self.b(y))


@model
class Chunked(Base):
    """Rows in chunks, as for memory: list comprehensions, zip, enumerate, sorted."""

    def forward(self, x: Tensor) -> Tensor:
        with first():
            parts = [self.a(one) * (k + 1) for k, one in enumerate(x.chunk(2, dim=1))]
            x = torch.cat(sorted(parts, key=lambda one: -one.shape[1]), 1)
        with second():
            rows = [self.head(torch.tanh(self.b(row))) for row in x.unbind(0)]
            return torch.stack(rows)


@model
class Uncertain(Base):
    """Learned temperatures, one for each class, and a bias that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.dead = nn.Parameter(torch.zeros(C)), nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with second():
            return y * torch.exp(-self.log_scale) + self.dead.detach()


@model
class Jagged(Base):
    """Lengths of rows from the data: what is beyond is masked."""

    def forward(self, x: Tensor) -> Tensor:
        with first():
            lengths = (x[..., 0] > -0.5).sum(1)
            mask = torch.arange(T) < lengths[:, None]
            y = self.a(x).masked_fill(~mask[..., None], 0.0)
        with second():
            mean = y.sum(1) / lengths.clamp(min=1)[:, None]
            return self.head(self.b(y) + mean[:, None])


@model
class OldNorm(Base):
    """Weight and spectral norm in their old form, with hooks before the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.weight_norm(self.a)


@model
class Spectral(Base):
    """Power iterations in a hook: a buffer that is updated and computed with."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.spectral_norm(self.b)


@model
class Sequences(nn.Module):
    """nn.Sequential in nn.Sequential, with functions wrapped as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.GELU(), nn.LayerNorm(D)))
        self.second = nn.Sequential(
            nn.Identity(), nn.Flatten(1), nn.Unflatten(1, (T, D)), nn.Linear(D, C)
        )

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = self.first(x)
        with second():
            return self.second(x)


@model
class BatchStatistics(Base):
    """Rows see each other: their mean is taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(T, momentum=0.2)

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = self.norm(torch.tanh(self.a(x)))
        with second():
            return self.head(self.b(x))


@model
class Counting(Base):
    """A counter and a list that only a log reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.shapes = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        return super().forward(x)


@model
class Warmed(Base):
    """A counter that a schedule in the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 4)


@model
class Stored(Base):
    """An auxiliary value that the forward leaves in an attribute, and the loss does not read."""

    def forward(self, x: Tensor) -> Tensor:
        with first():
            x = torch.tanh(self.a(x))
            self.last = x
        with second():
            self.size = self.last.detach().norm()
            return self.head(self.b(self.last))


@model
class Functional(Base):
    """torch.func.functional_call with changed weights."""

    def forward(self, x: Tensor) -> Tensor:
        with first():
            weights = {"weight": self.a.weight * 0.5, "bias": self.a.bias}
            x = torch.tanh(torch.func.functional_call(self.a, weights, (x,)))
        with second():
            return self.head(self.b(x))


@model
class Complexity(Base):
    """Rotary positions as complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        with first():
            pairs = torch.view_as_complex(self.a(x).unflatten(-1, (-1, 2)).contiguous())
            angles = torch.arange(T, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3, 0.1]).to(
                x.dtype
            )
            x = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
        with second():
            return self.head(self.b(x))


@model
class Halves(Base):
    """Two towers that meet, one of them frozen and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(T)).eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Halves:
        super().train(mode)
        self.tower.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with first():
            with torch.no_grad():
                side = self.tower(x)
            x = torch.tanh(self.a(x))
        with second():
            return self.head(self.b(x) * side)


# Losses


@loss
def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@loss
def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)


@loss
def classes_weighed(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, C, dtype=logits.dtype)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight)


@loss
def first_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


@loss
def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    labels = torch.where(labels == 0, -100, labels)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@loss
def masked(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    mask = (labels > 1).to(each.dtype)
    return (each * mask).sum() / mask.sum()


@loss
def focal(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


@loss
def per_row(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    mask = (labels > 0).to(each.dtype)
    return ((each * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


@loss
def dice(logits: Tensor, labels: Tensor) -> Tensor:
    p, hot = logits.softmax(-1), F.one_hot(labels, C).to(logits.dtype)
    return 1 - (2 * (p * hot).sum() + 1) / (p.sum() + hot.sum() + 1)


@loss
def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100


@loss
def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    z = F.normalize(logits.mean(1), dim=-1)
    return F.cross_entropy(z @ z.T * 5, torch.arange(len(z)))


@loss
def several(logits: Tensor, labels: Tensor) -> Tensor:
    penalty = 1e-2 * logits.square().mean() + 1e-2 * logits.logsumexp(-1).square().mean()
    return entropy(logits, labels) + penalty


@loss
def ranked(logits: Tensor, labels: Tensor) -> Tensor:
    right = logits.gather(-1, labels[..., None])
    return F.relu(1 - right + logits).sum(-1).mean(dim=(0, 1)) - 1


@loss
def by_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return -logp.gather(-1, labels[..., None]).sum() / labels.numel()


@loss
def rooted(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - F.one_hot(labels, C)).square().mean().sqrt()


@loss
def divergence(logits: Tensor, labels: Tensor) -> Tensor:
    target = F.one_hot(labels, C).to(logits.dtype) * 0.9 + 0.02
    return F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
