"""Blocks for a search by `job/test_model_search.py`: kinds of code that no other test draws.

A block maps x [rows, T, D], with ids [rows, T] and a mask [rows, T], to the shape of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

D, T, IDS = 8, 5, 7  # width, time, different ids
BLOCKS: dict[str, tuple[Callable[..., Tensor], Callable[[], dict[str, Any]]]] = {}
Block = Callable[["Layer", Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """What blocks find on `self`."""

    def __init__(self, block: Block, more: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.block = block
        self.w, self.u = (nn.Parameter(torch.randn(D, D) / 3) for _ in range(2))
        self.v, self.s = nn.Parameter(torch.randn(D) / 2), nn.Parameter(torch.tensor(0.6))
        self.table = nn.Embedding(IDS, D)
        for name, one in more().items():
            setattr(self, name, one)

    def forward(self, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
        return torch.tanh(self.block(self, x, ids, keep)) + 0.5 * x


def block(**more: Callable[[], Any]) -> Callable[[Block], Block]:
    def add(function: Block) -> Block:
        BLOCKS[function.__name__] = function, lambda: {n: make() for n, make in more.items()}
        return function

    return add


# Mixing along time


@block()
def selective_scan(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    gate, state, out = torch.sigmoid(x @ s.w), torch.zeros_like(x[:, 0]), []
    for t in range(T):
        state = gate[:, t] * state + (1 - gate[:, t]) * x[:, t]
        out.append(state * F.silu(x[:, t] @ s.u))
    return torch.stack(out, dim=1)


@block()
def token_shift(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    before = F.pad(x, (0, 0, 1, -1))
    k, r = torch.lerp(x, before, s.v.sigmoid()), torch.lerp(before, x, 0.3)
    return torch.sigmoid(r @ s.w) * (F.relu(k @ s.u) ** 2)


@block()
def retention(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    n = torch.arange(T)
    decay = torch.where(n[:, None] >= n, 0.9 ** (n[:, None] - n).to(x.dtype), 0.0)
    return ((x @ s.w) @ x.mT * decay) @ x


@block()
def alibi(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (x @ s.w, x @ s.u, x))
    slopes = torch.tensor([2 ** (-8 / (h + 1)) for h in range(2)], dtype=x.dtype)
    bias = -(torch.arange(T)[:, None] - torch.arange(T)).abs() * slopes[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


@block()
def grouped_queries(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    q = (x @ s.w).view(len(x), T, 4, 2).transpose(1, 2)
    k, v = ((x @ s.u)[..., :4].view(-1, T, 2, 2).transpose(1, 2) for _ in range(2))
    k, v = (y.repeat_interleave(2, dim=1) for y in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)


@block(bias=lambda: nn.Embedding(6, 2))
def buckets(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    apart = (torch.arange(T)[None] - torch.arange(T)[:, None]).abs()
    large = 2 + (torch.log(apart.clamp(min=1) / 2) / math.log(4) * 2).long()
    bias = s.bias(torch.where(apart < 2, apart, large.clamp(max=5))).permute(2, 0, 1)
    q, k = ((x @ w).unflatten(-1, (2, -1)).transpose(1, 2) for w in (s.w, s.u))
    weights = (q @ k.mT + bias).masked_fill(~keep[:, None, None], -1e4).softmax(-1)
    return (weights @ x.unflatten(-1, (2, 4)).transpose(1, 2)).transpose(1, 2).flatten(2)


@block(latents=lambda: nn.Parameter(torch.randn(3, D)))
def perceiver(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    z = s.latents.expand(x.size(0), -1, -1)
    z = torch.softmax(z @ s.w @ x.mT, -1) @ x
    return torch.softmax(x @ s.u @ z.mT, -1) @ z


@block()
def sinkhorn(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    scores = (x @ s.w) @ x.mT / 3
    for _ in range(3):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp() @ x


@block()
def sparsemax(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    scores = (x @ s.w) @ x.mT
    down = scores.sort(-1, descending=True).values
    sums, k = down.cumsum(-1) - 1, torch.arange(1, T + 1)
    many = (down * k > sums).sum(-1, keepdim=True)
    return F.relu(scores - sums.gather(-1, many - 1) / many) @ x


@block(conv=lambda: nn.Conv1d(D, D, 3, groups=D))
def causal_window(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = s.conv(F.pad(x.mT, (2, 0))).mT
    windows = F.pad(y, (0, 0, 2, 0)).unfold(1, 3, 1)
    return torch.einsum("...td,...tdk->...td", y @ s.w, windows)


@block(kernel=lambda: nn.Parameter(torch.randn(D, 2, dtype=torch.complex128)))
def state_space(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    steps = torch.arange(T, dtype=x.dtype)
    rates = -s.kernel.real.exp() + 1j * s.kernel.imag
    kernel = (torch.exp(rates[..., None] * steps) * s.v[:, None, None]).sum(1).real
    mixed = torch.fft.rfft(x.mT, n=2 * T) * torch.fft.rfft(kernel, n=2 * T)
    return torch.fft.irfft(mixed, n=2 * T)[..., :T].mT


@block()
def haar(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    low, high = (even + odd) / math.sqrt(2), (even - odd) / math.sqrt(2) * s.v[:4]
    return torch.stack([low + high, low - high], -1).flatten(-2) @ s.w


@block(cell=lambda: nn.LSTMCell(D, D))
def cells(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    h = c = x.new_zeros(x.shape[0], D)
    out = x.new_empty(x.shape)
    for t in reversed(range(T)):
        h, c = s.cell(x[:, t], (h, c))
        h = torch.where(keep[:, t, None], h, x[:, t])
        out[:, t] = h
    return out


@block(gru=lambda: nn.GRU(D, 4, batch_first=True, bidirectional=True))
def both_directions(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.gru(x)[0]


@block(rnn=lambda: nn.RNN(D, D, nonlinearity="relu", num_layers=2))
def old_rnn(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.rnn(x.transpose(0, 1))[0].transpose(0, 1)


@block(m=lambda: nn.TransformerEncoder(
    nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=True), 1, enable_nested_tensor=False,
))  # fmt: skip
def padded_encoder(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.m(x, src_key_padding_mask=~keep)


# Rows in other places


@block(filters=lambda: nn.Parameter(torch.randn(4, T, 3) / 2))
def modulated(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    """Each row has its own filters, as in StyleGAN2: rows are groups of channels."""
    b, style = len(x), 1 + x.mean(-1)
    w = s.filters * style[:, None, :, None]
    w = w * torch.rsqrt(w.square().sum((2, 3), keepdim=True) + 1e-6)
    y = F.conv1d(x.reshape(1, b * T, D), w.view(b * 4, T, 3), padding=1, groups=b)
    return F.pad(y.view(b, 4, D), (0, 0, 0, 1)) * s.s


@block()
def twice_the_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    both = torch.cat([x, x.flip(1)]) @ s.w
    one, other = torch.relu(both).chunk(2)
    return one - other * s.s


@block()
def interleaved_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = x.repeat_interleave(2, 0) * torch.tensor([1.0, -0.5]).repeat(len(x))[:, None, None]
    return (F.softplus(y @ s.w).unflatten(0, (-1, 2)) * s.s).sum(1)


@block()
def rows_last(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = torch.einsum("btd,de->etb", x, s.w)
    return (y * s.v[:, None, None]).permute(2, 1, 0) + y.swapaxes(0, 2).roll(1, 1)


@block()
def mapped(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    def one(row: Tensor, own: Tensor) -> Tensor:
        return torch.cov(row.T) @ s.w @ row.T * own.sum()

    return torch.vmap(one)(x, keep.to(x.dtype)).mT / 9


@block()
def python_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    rows = []
    for row, own in zip(x, ids, strict=True):
        rows.append(row @ s.w + s.table(own))
    return torch.stack(rows)


@block()
def own_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    b = torch.arange(x.shape[0], device=x.device)
    best = (x @ s.v).argmax(1)
    return x[b, best][:, None] @ s.w + x[b[:, None], ids % T]


# Tokens that are chosen


@block(experts=lambda: nn.Parameter(torch.randn(3, D, D) / 3))
def expert_choice(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    scores = (x @ s.w[:, :3]).softmax(-1)
    weight, at = scores.topk(2, dim=1)
    at = at.transpose(1, 2)[..., None].expand(-1, -1, -1, D)
    taken = x[:, None].expand(-1, 3, -1, -1).gather(2, at)
    done = torch.einsum("betd,edf->betf", taken, s.experts) * weight.transpose(1, 2)[..., None]
    return torch.zeros_like(x).scatter_add(1, at.flatten(1, 2), done.flatten(1, 2))


@block()
def depths(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    weight, at = torch.topk(x @ s.v, 3, dim=1, sorted=False)
    at = at.sort(1).values[..., None].expand(-1, -1, D)
    return x.scatter(
        1, at, F.gelu(x.gather(1, at) @ s.w) * weight.sigmoid()[..., None].mean(1, True)
    )


@block()
def merged(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    left, right = x[:, :3], x[:, 3:]
    near = (F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).mT).argmax(-1)
    at = near[..., None].expand(-1, -1, D)
    joined = right.scatter_reduce(1, at, left, reduce="mean", include_self=True)
    return torch.cat([left @ s.w, joined], 1)


@block()
def halting(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    done, out, state = x.new_zeros(x.shape[:2]), torch.zeros_like(x), x
    for step in range(3):
        state = torch.tanh(state @ s.w + step / 3)
        p = torch.sigmoid(state @ s.v) if step < 2 else 1 - done
        p = torch.minimum(p, 1 - done)
        out, done = out + p[..., None] * state, done + p
    return out


@block()
def hard_mask(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    soft = torch.sigmoid(x @ s.w)
    hard = (soft > soft.kthvalue(3, dim=-1, keepdim=True).values).to(x.dtype)
    return x * (hard + soft - soft.detach())


@block(keys=lambda: nn.Parameter(torch.randn(2, 3, D // 2)), values=lambda: nn.EmbeddingBag(
    9, D, mode="sum",
))  # fmt: skip
def product_keys(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    one, other = ((h @ k.T).topk(2) for h, k in zip(x.chunk(2, -1), s.keys, strict=True))
    scores = (one.values[..., None] + other.values[..., None, :]).flatten(-2)
    at = (one.indices[..., None] * 3 + other.indices[..., None, :]).flatten(-2)
    weights = scores.softmax(-1)
    return s.values(at.flatten(0, 1), per_sample_weights=weights.flatten(0, 1)).view_as(x)


@block()
def hashed(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    pairs = torch.bitwise_xor(ids * 31, F.pad(ids, (1, -1)) * 17) % IDS
    return s.table(pairs) * x + s.table(torch.div(ids, 2, rounding_mode="floor")) @ s.w


@block()
def graph_edges(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    source, target = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
    messages = F.leaky_relu(x[:, source] @ s.w + x[:, target] @ s.u)
    weights = torch.exp(messages @ s.v)
    norm = x.new_zeros(len(x), T).index_add(1, target, weights)
    found = torch.zeros_like(x).index_add_(1, target, messages * weights[..., None])
    return found / (norm[..., None] + 1e-6)


# Weights that are made


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def symmetric() -> nn.Module:
    layer = nn.Linear(D, D, bias=False)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@block(m=symmetric)
def parametrized(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    with parametrize.cached():
        return s.m(torch.relu(s.m(x)))


@block(cores=lambda: nn.ParameterList(
    [torch.randn(2, 2, 3), torch.randn(3, 2, 2, 3), torch.randn(3, 2, 2)]
))  # fmt: skip
def tensor_train(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = x.unflatten(-1, (2, 2, 2))
    return torch.einsum("...abc,aip,pbjq,qck->...ijk", y, *s.cores).flatten(-3) / 5


@block(left=lambda: nn.Parameter(torch.randn(4, 2, 2)), right=lambda: nn.Parameter(
    torch.randn(2, 4, 4) / 2
))  # fmt: skip
def butterfly(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = x.flatten(0, 1).view(-1, 4, 2).transpose(0, 1).bmm(s.left)
    y = y.permute(2, 1, 0).contiguous().bmm(s.right)
    return y.transpose(0, 1).reshape(len(x), T, D)


@block()
def standardised(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    w = torch.cat([s.w[:4], s.u[4:]])
    std, mean = torch.std_mean(w, dim=1, keepdim=True, correction=0)
    return F.linear(x, (w - mean) / (std + 1e-3), s.v)


@block(members=lambda: nn.ModuleList(nn.Linear(D, D) for _ in range(2)))
def ensemble(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    weights = torch.stack([m.weight for m in s.members])
    biases = torch.stack([m.bias for m in s.members])
    return torch.vmap(F.linear, in_dims=(None, 0, 0))(x, weights, biases).mean(0)


@block(grid=lambda: nn.Buffer(torch.linspace(-2, 2, 7)), spline=lambda: nn.Parameter(
    torch.randn(D, D, 4) / 3
))  # fmt: skip
def splines(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y, g = torch.tanh(x)[..., None], s.grid.to(x.dtype)
    bases = ((y >= g[:-1]) & (y < g[1:])).to(x.dtype)
    for k in range(1, 3):
        left = (y - g[: -k - 1]) / (g[k:-1] - g[: -k - 1]) * bases[..., :-1]
        bases = left + (g[k + 1 :] - y) / (g[k + 1 :] - g[1:-k]) * bases[..., 1:]
    return torch.einsum("btdk,dek->bte", bases, s.spline)


@block()
def runge_kutta(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    def slope(t: float, y: Tensor) -> Tensor:
        return torch.sin(y @ s.w + t) * s.v

    for t in (0.0, 0.5):
        a = slope(t, x)
        b = slope(t + 0.25, x + 0.25 * a)
        x = x + 0.5 * (a + 2 * b + slope(t + 0.5, x + 0.5 * b)) / 4
    return x


@block()
def coupled(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    one, other = x.tensor_split(2, -1)
    other = other * torch.exp(torch.tanh(one @ s.w[:4, :4])) + one @ s.u[:4, :4]
    return torch.cat([other, one * s.v[:4] + other.square()], -1)


# Tensors that are written, odd sizes and types


@block()
def written(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y = (x @ s.w).clone()
    y.masked_fill_(~keep[..., None], 0.1).index_fill_(1, torch.tensor([2]), 0.3)
    y.diagonal(dim1=1, dim2=2).mul_(2).add_(s.s)
    y[:, -1].addcmul_(x[:, 0], s.v, value=0.5)
    return y.scatter_(1, ids[:, :1, None].remainder(T).expand(-1, 1, D), 0.7)


@block()
def put_back(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out.copy_(x @ s.w)
    pairs = torch.tril_indices(T, T, -1)
    near = (x[:, pairs[0]] * x[:, pairs[1]]).sum(-1)
    full = x.new_zeros(len(x), T, T)
    full[:, pairs[0], pairs[1]] = near
    return (full + full.mT).softmax(-1) @ out


@block()
def chosen_elements(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    out = x.clone()
    out[keep] = x[keep] @ s.w
    return out


@block()
def pieces(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    nothing = x[:, :0].sum(1, keepdim=True)
    flags = keep.cumsum(1).to(torch.int32).bitwise_and(1).bool()
    y = torch.where(flags[..., None], x, -x).type_as(s.w) @ s.w
    return y + nothing + keep.all(-1)[:, None, None] * s.s + ids.float().double()[..., None] / 9


@block(norm=lambda: nn.Module())
def nothing_inside(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    x, y = torch.broadcast_tensors(x[:, :, None], (x @ s.w)[:, None])
    return torch.hypot(x, y).amin(2) - torch.logaddexp(x, y).amax(2)


@block(pool=lambda: nn.MaxPool1d(2, return_indices=True), back=lambda: nn.MaxUnpool1d(2))
def unpooled(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    y, at = s.pool(x @ s.w)
    return s.back(y * s.s, at, output_size=x.size())


@block()
def transformed(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    window = torch.hann_window(4, dtype=x.dtype)
    flat = (x @ s.w).flatten(1)
    found = torch.stft(flat, 4, 2, window=window, return_complex=True)
    return torch.istft(found * s.s, 4, 2, window=window, length=flat.shape[1]).view_as(x)


@block()
def scaled_by_time(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    b, t, d = x.shape
    lengths = keep.sum(-1, keepdim=True).clamp_min(1)
    return (x @ s.w) * t**-0.5 + math.log(d) * x / lengths[..., None]


@block()
def distances(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    far = torch.cdist(x @ s.w, x, p=1.0)
    near = far.argsort(-1)[..., 1:3]
    return torch.take_along_dim(x[:, None], near[..., None], 2).mean(2) - torch.dist(s.w, s.u) * x
