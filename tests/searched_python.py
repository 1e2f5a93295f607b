"""More blocks for a search by `job/test_model_search.py`: what Python and torch let modules do.

State in Python, caches, hooks, tied and shared memory, views and writes, types, control flow,
custom derivatives, buffers that change, parametrizations.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial, reduce
from typing import Any

import torch
from searched_blocks import IDS, D, Layer, T, block
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

linear = partial(nn.Linear, D, D)


# State in Python


@block(seen=lambda: False)
def first_call(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    scale = 1.0 if s.seen else 2.0
    s.seen = True
    return scale * x @ s.w


@block(masks=dict)
def cached_mask(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    """By length, as rotary embeddings do."""
    if T not in s.masks:
        s.masks[T] = torch.ones(T, T, dtype=x.dtype).tril().div(T)
    return s.masks[T] @ x @ s.w


@block(mask=lambda: None)
def late_attribute(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    if s.mask is None:
        s.mask = torch.linspace(0, 1, T, dtype=x.dtype)[:, None]
    return x * s.mask @ s.u


@cache
def positions(length: int) -> Tensor:
    return torch.linspace(0, 1, length, dtype=torch.float64)[:, None]


@block()
def remembered_function(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w + positions(T) * s.v


@block(history=partial(deque, maxlen=2))
def remembered_shapes(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    s.history.append(tuple(x.shape[1:]))
    return x @ s.w * len(s.history)


@block(turns=lambda: itertools.cycle([0.5, 1.5]))
def by_turns(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w * next(s.turns)


@block(last=lambda: torch.zeros(()))
def detached_memory(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    out = x @ s.w + s.last
    s.last = out.detach().mean()
    return out


@block(options=lambda: {"scale": 0.7, "kind": ["relu", {"power": 2}]})
def nested_options(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    kind, more = s.options["kind"]
    return getattr(F, kind)(x @ s.w) ** more["power"] * s.options["scale"]


# Control flow in Python


@block()
def even_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w if len(x) % 2 == 0 else x @ s.u


@block()
def many_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ (s.w if x.size(0) > 3 else s.u)


@block()
def by_modes(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    match s.training, torch.is_grad_enabled(), x.requires_grad or s.w.requires_grad:
        case True, True, True:
            return x @ s.w
        case _:
            return x @ s.u


def steps(x: Tensor, w: Tensor) -> Iterator[Tensor]:
    for t in range(T):
        try:
            yield x[:, t] @ w + x[:, t + 1]
        except IndexError:
            yield x[:, t]


@block()
def generated(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return torch.stack([*steps(x, s.w)], 1)


@block()
def folded(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    done: Callable[[Tensor, Tensor], Tensor] = lambda h, w: (h @ w).tanh()  # noqa: E731
    return reduce(done, (s.w, s.u, s.w.T), x)


@block()
def numbers_of_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w * x.new_tensor(x.shape[0]).rsqrt()


@block()
def counted_elements(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w / (torch.ones_like(x).sum() / x.numel())


# Views and writes


@block()
def written_slices(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = x.clone()
    y[:, ::2] += s.v
    y[:, 1].mul_(s.s)
    y[..., -1] = x[..., 0] @ s.w[:T, 0].unsqueeze(1)
    return y


@block()
def written_mask(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = x @ s.w
    y[~keep] = s.v
    return y.masked_fill_(ids[..., None] == 2, 0.3)


@block()
def written_through_views(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    flat = y.view(-1, D)
    flat.index_add_(0, torch.arange(len(flat)).flip(0), x.reshape(-1, D) @ s.w)
    return flat.flip(0).view_as(x) + y.detach() * 0


@block()
def overlapping_windows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = F.pad(x @ s.w, (0, 0, 1, 1)).contiguous()
    windows = y.as_strided((len(x), T, 3, D), (y.stride(0), D, D, 1))
    return torch.einsum("btkd,d->btd", windows, s.v)


@block()
def data_attribute(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x.data @ s.w + x * s.w.data[0]


@block()
def copied_into(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    y[:, :2].copy_(x[:, :2] @ s.w)
    y[:, 2:] = (x[:, 2:] @ s.u).relu_()
    return torch.sub(y, s.v)


# Types


@block()
def complex_rotation(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    turned = torch.view_as_complex((x @ s.w).unflatten(-1, (-1, 2)))
    angle = torch.polar(torch.ones_like(s.v[:4]), s.v[:4])
    return torch.view_as_real(turned * angle ** torch.arange(T)[:, None]).flatten(-2)


@block()
def spectrum(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    waves = torch.fft.rfft(x @ s.w, dim=1)
    gate = torch.complex(s.s.tanh(), s.v[0])
    return torch.fft.irfft(waves * gate, n=T, dim=1) + torch.fft.fft2(x).real * 0.1


@block(c=lambda: nn.Parameter(torch.randn(D, D, dtype=torch.complex128) / 3))
def complex_parameter(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return (x.to(s.c.dtype) @ s.c).abs() - torch.angle(x + 1j * s.v).sin()


@block()
def mixed_types(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    coarse = x.detach().half().double() + keep[..., None] * ids[..., None].to(torch.int16)
    return (x + 0.1 * coarse) @ s.w + (ids % 3 == 0)[..., None] * s.v


# Hooks


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
        self.register_forward_hook(lambda module, given, out: out + given[0])


@block(inner=Hooked)
def module_hooks(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.inner(x)


@block()
def tensor_hook(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = x @ s.w
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return y * s.v


@block()
def norm_hook(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = x @ s.w
    if y.requires_grad:
        y.register_hook(lambda grad: grad / (grad.norm() + 1e-3))
    return y


def halved(module: nn.Module, into: Any, out: Any) -> Any:
    return None if into[0] is None else (into[0] * 0.5,)


class BackwardHooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.register_full_backward_hook(halved)


@block(inner=BackwardHooked)
def backward_hook(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.inner(x)


def with_parameter_hook() -> nn.Parameter:
    found = nn.Parameter(torch.randn(D, D) / 3)
    found.register_hook(lambda grad: 0.5 * grad)
    return found


@block(p=with_parameter_hook)
def parameter_hook(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.p


# Tied and shared


class Tied(nn.Module):
    """One weight under three names, once transposed; one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(), linear()
        self.other.weight = self.one.weight
        self.list = nn.ModuleList([self.one, self.other, self.one])
        self.also = self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.list:
            x = layer(x).tanh()
        return F.linear(x, self.one.weight.T, self.also)


@block(inner=Tied)
def tied(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.inner(x)


class SharedMemory(nn.Module):
    """A parameter whose memory is also a buffer's."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D) / 3)
        self.register_buffer("view", self.w.data)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + x @ self.view.T


@block(inner=SharedMemory)
def shared_memory(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.inner(x)


@block(
    lists=lambda: nn.ParameterList([torch.randn(D) / 2 for _ in range(T)]),
    named=lambda: nn.ParameterDict({"a": torch.randn(D, D) / 3, "b": torch.randn(0, D)}),
)
def containers(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    rows = [x[:, t] * p for t, p in enumerate(s.lists)]
    return torch.stack(rows, 1) @ s.named["a"] + s.named["b"].sum(0)


# Custom derivatives


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, unused: Any) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.scale * grads[0], None, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        y, most = x @ w, (x @ w).argmax(-1)
        ctx.save_for_backward(x, w)
        ctx.mark_non_differentiable(most)
        ctx.set_materialize_grads(False)
        return y, most

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, w), grad = ctx.saved_tensors, grads[0]
        of_x = grad @ w.T if ctx.needs_input_grad[0] else None
        return of_x, x.flatten(0, 1).T @ grad.flatten(0, 1) if ctx.needs_input_grad[1] else None


class MeanGradient(torch.autograd.Function):
    """Its derivative depends on how many rows there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] - grads[0].mean(0, keepdim=True)


@block()
def reversed_gradient(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return Reversed.apply(x @ s.w, 0.3, {"a": 1}) @ s.u


@block()
def own_product(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y, most = Product.apply(x, s.w)
    return y + s.table(most % IDS)


@block()
def centred_gradient(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return MeanGradient.apply(x @ s.w)


# Buffers that change


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.w = nn.Parameter(torch.randn(D, D) / 3)

    def forward(self, x: Tensor) -> Tensor:
        out = (x - self.mean) @ self.w
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return out


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.w = nn.Parameter(torch.randn(D, D) / 3)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x @ self.w / (1 + 0.1 * self.steps)


@block(inner=Averaged)
def running_mean(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.inner(x)


@block(inner=Counting)
def counted_calls(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.inner(x)


@block(norm=lambda: nn.InstanceNorm1d(T, affine=True, track_running_stats=True))
def running_instance(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.norm(x) @ s.w


@block(table2=lambda: nn.Embedding(IDS, D, max_norm=1.0))
def renormed(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w + s.table2(ids)


# torch.nn.utils and parametrizations


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


def symmetric() -> nn.Module:
    found = linear()
    parametrize.register_parametrization(found, "weight", Symmetric())
    return found


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "old_weight_norm": lambda: nn.utils.weight_norm(linear()),
    "spectral": lambda: parametrizations.spectral_norm(linear()),
    "old_spectral": lambda: nn.utils.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "householder": lambda: parametrizations.orthogonal(linear(), orthogonal_map="householder"),
    "pruned": lambda: prune.l1_unstructured(linear(), "weight", amount=0.3),
    "symmetric": symmetric,
    "encoder": lambda: nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True),
    "gru": lambda: nn.GRU(D, D, batch_first=True, bidirectional=False),
    "group_norm": lambda: nn.Sequential(nn.Unflatten(-1, (2, 4)), nn.Flatten(-2), linear()),
    "shuffled": lambda: nn.Sequential(linear(), nn.ChannelShuffle(1), nn.RMSNorm(D)),
}  # fmt: skip


def wrapped(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    found = s.inner(x)
    return found[0] if isinstance(found, tuple) else found


for _name, _make in WRAPPED.items():
    wrapped.__name__ = _name
    block(inner=_make)(wrapped)


@block(one=linear)
def checkpointed(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return checkpoint(lambda h: s.one(h).tanh() @ s.w, x, use_reentrant=False)


@block(one=linear)
def perturbed(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    other = {name: p * 1.1 for name, p in s.one.named_parameters()}
    return torch.func.functional_call(s.one, other, (x,)) + s.one(x)


@block(one=lambda: nn.EmbeddingBag(IDS, D, mode="sum", padding_idx=1))
def bags(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w + s.one(ids, per_sample_weights=keep.to(x.dtype))[:, None]
