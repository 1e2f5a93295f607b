"""Random models: blocks of many kinds in random order, in regions, some wrapped or shared.

A block maps [rows, 6, 4] to anything with as many rows; `fitted` brings it back to that shape.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from piper.capture import annotate

Block = Callable[["Layer", Tensor], Tensor]
WIDTH, LENGTH = 4, 6


def fitted(y: Tensor) -> Tensor:
    """Whatever a block gives, as [rows, 6, 4], such that every element counts."""
    y = torch.view_as_real(y) if y.is_complex() else y
    flat = y.flatten(1).double()
    size = LENGTH * WIDTH
    times = -(-size // flat.shape[1])
    return torch.tanh(flat.repeat(1, times)[:, :size]).view(-1, LENGTH, WIDTH) + flat.mean(1).view(
        -1, 1, 1
    )


class Layer(nn.Module):
    """What blocks find on `self`: weights of many shapes, modules, buffers."""

    def __init__(self, block: Block, extra: Callable[[], dict[str, Any]] | None) -> None:
        super().__init__()
        self.block, self.lin = block, nn.Linear(WIDTH, WIDTH)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.v = nn.Parameter(torch.randn(WIDTH))
        self.s = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool())
        for name, one in (extra() if extra else {}).items():
            setattr(self, name, one)

    def forward(self, x: Tensor) -> Tensor:
        return fitted(self.block(self, self.lin(x)))


def square(x: Tensor) -> Tensor:
    """Well-conditioned matrices [rows, 4, 4]."""
    top = x[:, :WIDTH] / 4
    return top @ top.transpose(1, 2) + torch.eye(WIDTH, dtype=x.dtype) * 2


def symmetric(x: Tensor) -> Tensor:
    """With different eigenvalues."""
    steps = torch.diag(torch.arange(1.0, WIDTH + 1, dtype=x.dtype))
    return square(x) / 4 + steps


def slices(s: Layer, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    y[:, 0] += s.v
    y[..., ::2] *= 2.0
    return y


def scattered(s: Layer, x: Tensor) -> Tensor:
    index = torch.tensor([0, 2, 2, 1, 5, 0])
    return torch.zeros_like(x).index_add(1, index, x @ s.w)


def routed(s: Layer, x: Tensor) -> Tensor:
    weights, chosen = (x @ s.w).softmax(-1).topk(2, -1)
    return x.gather(-1, chosen) * weights


def capsules(s: Layer, x: Tensor) -> Tensor:
    votes, logits = x @ s.w, torch.zeros(*x.shape[:2], dtype=x.dtype)
    for _ in range(3):
        mean = (votes * logits.softmax(-1).unsqueeze(-1)).sum(1)
        logits = logits + (votes.detach() * mean.detach().unsqueeze(1)).sum(-1)
    return mean


def fixed_point(s: Layer, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    with torch.no_grad():
        for _ in range(3):
            z = torch.tanh(z @ s.w / 4 + x)
    return torch.tanh(z @ s.w / 4 + x)


def quantized(s: Layer, x: Tensor) -> Tensor:
    codes = torch.cdist(x, s.w.expand(len(x), WIDTH, WIDTH)).argmin(-1)
    found = s.w[codes]
    return x + (found - x).detach() + (found - x.detach()).square().mean()


def smoothed(s: Layer, x: Tensor) -> Tensor:
    s.seen = 0.9 * s.seen + 0.1 * x.detach().mean((0, 1))
    return x * s.v


def linear_attention(s: Layer, x: Tensor) -> Tensor:
    q, k = F.elu(x @ s.w) + 1, F.elu(x) + 1
    state = (k.unsqueeze(-1) * x.unsqueeze(-2)).cumsum(1)
    return torch.einsum("btd,btde->bte", q, state) / k.sum(-1, keepdim=True)


def attention(s: Layer, x: Tensor) -> Tensor:
    scores = (x @ s.w) @ x.transpose(1, 2) / 2
    return scores.masked_fill(~s.mask, -math.inf).softmax(-1) @ x


def hyper(s: Layer, x: Tensor) -> Tensor:
    made = torch.outer(s.v, s.v) + x.mean(1).unsqueeze(-1) * s.w
    return torch.bmm(x, made)


def looped(s: Layer, x: Tensor) -> Tensor:
    h = torch.zeros(len(x), WIDTH, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] + h @ s.w)
    return h


def householder(s: Layer, x: Tensor) -> Tensor:
    v = s.v / s.v.norm()
    return x - 2 * (x @ v).unsqueeze(-1) * v


def segments(s: Layer, x: Tensor) -> Tensor:
    keys = torch.tensor([0, 0, 1, 2, 2, 2]).view(1, -1, 1).expand_as(x)
    found = torch.zeros(len(x), 3, WIDTH, dtype=x.dtype)
    return found.scatter_reduce(1, keys, x, "mean", include_self=False) * s.v


def put(s: Layer, x: Tensor) -> Tensor:
    y = x.clone()
    y[torch.arange(len(x)), x.detach()[..., 0].argmax(1)] = s.v
    return y.masked_fill_(y > 2, 0.5)


def warped(s: Layer, x: Tensor) -> Tensor:
    grid = F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(len(x), 2, 3), [len(x), 1, 5, 3])
    return F.grid_sample(x.unsqueeze(1), grid + s.s / 10, align_corners=False)


def triangular(s: Layer, x: Tensor) -> Tensor:
    right = s.w.expand(len(x), WIDTH, WIDTH)
    return torch.linalg.solve_triangular(square(x).tril(), right, upper=False)


def rounded(s: Layer, x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, -128, 127) * s.s


def autocasted(s: Layer, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x.float() @ s.w.float()).double()


def conv(make: Callable[[], nn.Module], channels_first: bool = True) -> tuple[Block, Any]:
    def block(s: Layer, x: Tensor) -> Tensor:
        return s.m(x if channels_first else x.transpose(1, 2))

    return block, lambda: {"m": make()}


def image(make: Callable[[], nn.Module]) -> tuple[Block, Any]:
    return (lambda s, x: s.m(x.unsqueeze(1).repeat(1, 2, 1, 1))), lambda: {"m": make()}


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, out: out + args[0])
    return layer


def transformer(**options: Any) -> Callable[[], nn.Module]:
    given: dict[str, Any] = {"dropout": 0.0, "batch_first": True, **options}
    return lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, **given)


def module(make: Callable[[], nn.Module]) -> tuple[Block, Any]:
    return (lambda s, x: s.m(x)), lambda: {"m": make()}


def plain(block: Block) -> tuple[Block, None]:
    return block, None


BLOCKS: dict[str, tuple[Block, Any]] = {
    "conv1d": conv(lambda: nn.Conv1d(LENGTH, 5, 3, padding=1, padding_mode="circular")),
    "causal conv": conv(lambda: nn.Conv1d(WIDTH, 4, 2, dilation=2, groups=2), False),
    "conv transpose": conv(lambda: nn.ConvTranspose1d(LENGTH, 3, 3, stride=2)),
    "conv2d": image(lambda: nn.Conv2d(2, 3, 3, stride=2, padding="valid", bias=False)),
    "depthwise": image(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.PReLU(4))),
    "channels last": image(lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)),
    "max pool": image(lambda: nn.MaxPool2d(2, return_indices=False)),
    "adaptive pool": image(lambda: nn.AdaptiveAvgPool2d((3, 2))),
    "lp pool": image(lambda: nn.LPPool2d(2, 2)),
    "fractional": plain(lambda s, x: F.avg_pool1d(x, 2, ceil_mode=True) * s.s),
    "pixel shuffle": plain(lambda s, x: F.pixel_unshuffle((x @ s.w).unsqueeze(1), 2)),
    "upsample": plain(lambda s, x: F.interpolate(x, size=7, mode="linear") * s.s),
    "bicubic": plain(lambda s, x: F.interpolate(x.unsqueeze(1), scale_factor=2, mode="bicubic")),
    "unfold": plain(lambda s, x: F.unfold(x.unsqueeze(1), 2) * s.s),
    "fold": plain(lambda s, x: F.fold(F.unfold(x.unsqueeze(1), 2), (6, 4), 2) * s.s),
    "tensor unfold": plain(lambda s, x: x.unfold(1, 3, 2) * s.s),
    "reflect": plain(lambda s, x: F.pad(x @ s.w, (1, 2), mode="reflect")),
    "group norm": module(lambda: nn.GroupNorm(3, LENGTH)),
    "instance norm": module(lambda: nn.InstanceNorm1d(LENGTH, affine=True)),
    "response norm": module(lambda: nn.LocalResponseNorm(2)),
    "rms norm": module(lambda: nn.RMSNorm(WIDTH)),
    "batch norm": module(lambda: nn.BatchNorm1d(LENGTH)),
    "bilinear": (lambda s, x: s.m(x, x.flip(1)), lambda: {"m": nn.Bilinear(4, 4, 3)}),
    "glu": plain(lambda s, x: F.glu(x @ s.w)),
    "activations": plain(lambda s, x: F.hardswish(x) + F.celu(x) * F.softplus(x) + F.mish(x * s.s)),
    "thresholds": plain(lambda s, x: F.hardshrink(x) + F.softshrink(x, 0.1) + F.relu6(x * s.s)),
    "siren": plain(lambda s, x: torch.sin(30 * s.s * (x @ s.w))),
    "fourier": plain(lambda s, x: torch.fft.fft2(x).real * s.s),
    "spectral conv": plain(lambda s, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * s.s, dim=1)),
    "complex": plain(lambda s, x: torch.polar(x.exp(), x @ s.w)),
    "complex product": plain(lambda s, x: torch.complex(x, x @ s.w) * torch.complex(s.v, s.v)),
    "radial": plain(lambda s, x: torch.exp(-torch.cdist(x, s.w.expand(len(x), 4, 4)).square())),
    "cosine": plain(lambda s, x: F.cosine_similarity(x.unsqueeze(2), s.w, dim=-1)),
    "density": plain(lambda s, x: torch.logsumexp((x @ s.w).unsqueeze(-1) - s.v.square(), -1)),
    "squeeze": plain(lambda s, x: x * torch.sigmoid(x.mean(1) @ s.w).unsqueeze(1)),
    "logcumsumexp": plain(lambda s, x: torch.logcumsumexp(x * s.s, 1)),
    "cumprod": plain(lambda s, x: (torch.tanh(x) + 1.5).cumprod(1) * s.s),
    "cummax": plain(lambda s, x: x.cummax(1).values * s.s),
    "sort": plain(lambda s, x: x.sort(1, descending=True).values @ s.w),
    "median": plain(lambda s, x: x.median(1).values + x.kthvalue(2, 1).values * s.s),
    "quantile": plain(lambda s, x: x.quantile(0.3, 1) * s.v),
    "top": plain(lambda s, x: x.topk(3, 1).values * s.s),
    "covariance": plain(lambda s, x: (x - x.mean(1, True)).mT @ (x - x.mean(1, True)) * s.s),
    "swin": plain(lambda s, x: torch.roll(x.view(-1, 3, 2, 4), (1, 1), (1, 2)) @ s.w),
    "where": plain(lambda s, x: torch.where(x > s.s, x * 2, x @ s.w).clamp(-2, 2)),
    "nan": plain(lambda s, x: torch.nan_to_num(x / x.relu(), 0.0, 1.0, -1.0) * s.s),
    "strided": plain(lambda s, x: x.contiguous().as_strided((len(x), 5, 4), (24, 4, 1)) * s.s),
    "split": plain(lambda s, x: torch.cat([p * k for k, p in enumerate(x.split([1, 2, 3], 1))], 1)),
    "unbind": plain(lambda s, x: torch.stack([t * s.v for t in x.unbind(1)][::-1], 1)),
    "mesh": plain(lambda s, x: x * torch.meshgrid(s.v, s.v, indexing="ij")[0].diagonal()),
    "kronecker": plain(lambda s, x: x @ torch.kron(s.w, torch.ones(1, 2, dtype=x.dtype))),
    "toeplitz": plain(lambda s, x: x @ torch.stack([s.v.roll(k) for k in range(4)])),
    "matrix exp": plain(lambda s, x: x @ torch.matrix_exp(s.w - s.w.T)),
    "determinant": plain(lambda s, x: torch.linalg.slogdet(square(x)).logabsdet.unsqueeze(1) * s.v),
    "eigh": plain(lambda s, x: torch.linalg.eigvalsh(symmetric(x)) * s.v),
    "svd": plain(lambda s, x: torch.linalg.svdvals(symmetric(x)) * s.v),
    "qr": plain(lambda s, x: torch.linalg.qr(square(x)).Q * s.s),
    "matrix power": plain(lambda s, x: torch.linalg.matrix_power(square(x) / 4, 3) @ s.w),
    "pinv": plain(lambda s, x: torch.linalg.pinv(square(x)) @ s.w),
    "triangular": plain(triangular),
    "special": plain(lambda s, x: torch.lgamma(x.abs() + 1) + torch.special.i0e(x * s.s)),
    "erf": plain(lambda s, x: torch.erfinv(torch.tanh(x) * 0.9) + torch.expm1(x * s.s)),
    "bucketize": plain(lambda s, x: s.w[torch.bucketize(x[..., 0].detach(), torch.arange(3))]),
    "one hot": plain(lambda s, x: F.one_hot(x.argmax(-1), 4).to(x.dtype) @ s.w),
    "embedding": (
        lambda s, x: s.m(x.argmax(-1)),
        lambda: {"m": nn.Embedding(4, 3, padding_idx=0, scale_grad_by_freq=True)},
    ),
    "bag": (lambda s, x: s.m(x.argmax(-1)), lambda: {"m": nn.EmbeddingBag(4, 3, mode="mean")}),
    "slices": plain(slices),
    "scattered": plain(scattered),
    "routed": plain(routed),
    "capsules": plain(capsules),
    "fixed point": plain(fixed_point),
    "quantized": plain(quantized),
    "smoothed": (smoothed, lambda: {"seen": nn.Buffer(torch.zeros(4))}),
    "linear attention": plain(linear_attention),
    "attention": plain(attention),
    "sdpa": plain(lambda s, x: F.scaled_dot_product_attention(x, x @ s.w, x, is_causal=True)),
    "hyper": plain(hyper),
    "looped": plain(looped),
    "householder": plain(householder),
    "segments": plain(segments),
    "put": plain(put),
    "warped": plain(warped),
    "checkpointed": plain(lambda s, x: checkpoint(hyper, s, x, use_reentrant=False)),
    "hooked": module(hooked),
    "transformer": module(transformer()),
    "norm first": module(transformer(norm_first=True, activation="gelu")),
    "decoder": (
        lambda s, x: s.m(x, x.flip(1)),
        lambda: {"m": nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)},
    ),
    "multihead": (
        lambda s, x: s.m(x, x, x, attn_mask=~s.mask)[0],
        lambda: {"m": nn.MultiheadAttention(WIDTH, 2, batch_first=True)},
    ),
    "weight norm": module(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
    "orthogonal": module(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))),
    "spectral norm": module(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
    "list": (
        lambda s, x: sum(x @ p for p in s.p) / 3,
        lambda: {"p": nn.ParameterList([torch.randn(4, 4) / 2 for _ in range(3)])},
    ),
    "dict": (
        lambda s, x: s.m["a"](x) * s.m["b"](x).sigmoid(),
        lambda: {"m": nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})},
    ),
    "masked": plain(lambda s, x: x.masked_select(x.detach() > 0).sum() * s.s + x),
    "nonzero": plain(lambda s, x: x + x[x > 0].mean() * s.s),
    "repeated": plain(lambda s, x: x.repeat_interleave(torch.tensor([1, 2, 0, 1, 1, 3]), 1) * s.s),
    "unique": plain(lambda s, x: x * s.s + torch.unique(x.argmax(-1)).sum()),
    "item": plain(lambda s, x: x * float(x.detach().mean()) * s.s),
    "decision": plain(lambda s, x: x * s.s if x.sum() > 0 else x @ s.w),
    "sparse": plain(lambda s, x: torch.sparse.mm(s.w.to_sparse(), x[0].T).T.expand(len(x), 6, 4)),
    "renormed": (lambda s, x: s.m(x.argmax(-1)), lambda: {"m": nn.Embedding(4, 3, max_norm=1.0)}),
    "half": plain(lambda s, x: (x.float() @ s.w.float()).bfloat16().double()),
    "autocast": plain(autocasted),
    "fake quantized": plain(rounded),
    "loss": plain(lambda s, x: F.huber_loss(x, x @ s.w, reduction="none") * s.s),
    "ema of weights": plain(lambda s, x: x @ (0.9 * s.w.detach() + 0.1 * s.w)),
    "views of weights": plain(lambda s, x: x @ s.w.view(2, 2, 4)[0].T @ s.w[1:3]),
    "vmap": plain(lambda s, x: torch.vmap(lambda row: row @ s.w)(x)),
    "tolist": plain(lambda s, x: x * sum(x.shape) * s.s),
}  # fmt: skip


class Net(nn.Module):
    """Blocks in regions. `plan`: for each, its layer, whether it is residual, and a new region."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.names = [draw.choice(list(BLOCKS)) for _ in range(draw.randint(2, 4))]
        self.layers = nn.ModuleList(Layer(*BLOCKS[name]) for name in self.names)
        order = list(range(len(self.names)))
        if draw.random() < 0.3:
            order.append(draw.choice(order))  # a layer that runs twice
        self.plan = [(k, draw.random() < 0.5, draw.random() < 0.6) for k in order]
        for layer in self.layers:
            if draw.random() < 0.15:
                layer.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        done = 0
        while done < len(self.plan):
            with annotate("PP"):
                x = self.run(x, done)
                done += 1
                while done < len(self.plan) and not self.plan[done][2]:
                    x = self.run(x, done)
                    done += 1
        with annotate("PP"):
            return self.head(x).square().mean()

    def run(self, x: Tensor, k: int) -> Tensor:
        index, residual, _ = self.plan[k]
        y = self.layers[index](x)
        return x + y if residual else y


def batch_of(seed: int) -> tuple[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(3, LENGTH, WIDTH, generator=draw, dtype=torch.float64),)
