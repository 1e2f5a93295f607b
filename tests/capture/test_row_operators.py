"""What operators do along rows or features, and whether rows are seen to meet.

The truth is tried on numbers: rows meet if one row changes the result of another one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper.capture.trace.arguments.inputs import inputs_of
from piper.capture.trace.row_calls.recorded_calls import RowCounts
from piper.capture.trace.row_calls.row_places import RowPlaces
from piper.capture.trace.row_calls.unvalued_run import calls_of

WIDTH = 8


class Mixing(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.mix = nn.Linear(WIDTH, WIDTH), mix
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mix(self.first(x)))


def with_mean(o: Tensor, h: Tensor) -> Tensor:
    return o.reshape(len(h), -1).mean(1, keepdim=True) + h


ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {  # along rows: 0; along features: 1
    "softmax": lambda h, d: h.softmax(d),
    "log softmax": lambda h, d: F.log_softmax(h, dim=d),
    "softmin": lambda h, d: F.softmin(h, dim=d),
    "gumbel": lambda h, d: F.gumbel_softmax(h, dim=d) * 0 + F.normalize(h, dim=d),
    "normalize": lambda h, d: F.normalize(h, dim=d),
    "cumsum": lambda h, d: h.cumsum(d),
    "cumprod": lambda h, d: h.cumprod(d),
    "cummax": lambda h, d: h.cummax(d).values,
    "cummin": lambda h, d: torch.cummin(h, d)[0],
    "logcumsumexp": lambda h, d: torch.logcumsumexp(h, d),
    "flip": lambda h, d: torch.flip(h, (d,)) + h,
    "fliplr/ud": lambda h, d: (torch.fliplr if d else torch.flipud)(h) + h,
    "roll": lambda h, d: torch.roll(h, 1, d) + h,
    "sort": lambda h, d: h.sort(d)[0] + h,
    "msort": lambda h, d: torch.msort(h) + h,
    "renorm": lambda h, d: torch.renorm(h, 2, d, 0.5),
    "cumtrapz": lambda h, d: (
        F.pad(torch.cumulative_trapezoid(h, dim=1), (1, 0)) + h
        if d
        else with_mean(torch.cat([h[:1], torch.cumulative_trapezoid(h, dim=0)]), h)
    ),
    "gradient": lambda h, d: torch.gradient(h, dim=d)[0],
    "rms norm": lambda h, d: F.rms_norm(h, h.shape[d:]),
    "layer norm": lambda h, d: F.layer_norm(h, h.shape[d:]),
    "mean": lambda h, d: h - h.mean(d, keepdim=True),
    "amax": lambda h, d: h / h.abs().amax(d, keepdim=True),
    "logsumexp": lambda h, d: h - h.logsumexp(d, keepdim=True),
    "std": lambda h, d: h / h.std(d, keepdim=True),
    "vnorm": lambda h, d: h / torch.linalg.vector_norm(h, dim=d, keepdim=True),
    "norm": lambda h, d: h / h.norm(dim=d, keepdim=True),
    "quantile": lambda h, d: h - h.quantile(0.5, dim=d, keepdim=True),
    "kth": lambda h, d: h - h.kthvalue(2, dim=d, keepdim=True)[0],
    "median": lambda h, d: h - h.median(dim=d, keepdim=True)[0],
    "topk": lambda h, d: h - h.topk(2, dim=d)[0].mean(d, keepdim=True),
    "glu": lambda h, d: with_mean(F.glu(h, dim=d).repeat(1 if d else 2, 1), h),
    "fft": lambda h, d: torch.fft.fft(h, dim=d).real,
    "rfft": lambda h, d: (
        torch.fft.irfft(torch.fft.rfft(h, dim=d), n=h.shape[d], dim=d).real
        + torch.fft.fftshift(h, dim=d)
    ),
    "fftshift": lambda h, d: torch.fft.fftshift(h, dim=d) + h,
    "hfft": lambda h, d: torch.fft.ifft(h, dim=d).abs(),
    "tensordot": lambda h, d: (
        torch.tensordot(torch.tensordot(h, h, ([d], [d])), h, ([1], [1 - d]))
        if d == 1
        else torch.tensordot(h, torch.tensordot(h, h, ([0], [0])), ([1], [0]))
    ),
    "einsum": lambda h, d: (
        torch.einsum("bd,bd->b" if d else "bd,bd->d", h, h)[:, None] * h
        if d
        else torch.einsum("bd,bd->d", h, h) * h
    ),
    "pad": lambda h, d: h + F.pad(h, (1, -1) if d else (0, 0, 1, -1)),
    "pad back": lambda h, d: h + F.pad(h, (-1, 1) if d else (0, 0, -1, 1)),
    "pad circ": lambda h, d: (
        h
        + (
            F.pad(h[None], (1, 1), mode="circular")[0, :, 2:]
            if d
            else F.pad(h.T[None], (1, 1), mode="circular")[0, :, 2:].T
        )
    ),
    "pad refl": lambda h, d: (
        h
        + (
            F.pad(h[None], (1, 1), mode="reflect")[0, :, 2:]
            if d
            else F.pad(h.T[None], (1, 1), mode="reflect")[0, :, 2:].T
        )
    ),
    "narrowcat": lambda h, d: h + torch.cat([h.narrow(d, 1, h.shape[d] - 1), h.narrow(d, 0, 1)], d),
    "split cat": lambda h, d: h + torch.cat(h.chunk(2, d)[::-1], d),
    "diff": lambda h, d: h + torch.diff(h, dim=d, prepend=h.narrow(d, 0, 1)),
    "diag embed": lambda h, d: (
        h * torch.diag_embed(h.mean(d)).diagonal()
        if d == 0
        else h * torch.diag_embed(h).diagonal(dim1=-2, dim2=-1)
    ),
    "cov": lambda h, d: h @ torch.cov(h.T) if d == 0 else h,
    "corrcoef": lambda h, d: h @ torch.corrcoef(h.T) if d == 0 else h,
    "outer": lambda h, d: h + torch.outer(h[:, 0], h[:, 1]).mean(d)[:, None],
    "cdist": lambda h, d: h + torch.cdist(h, h).mean(d)[:, None],
    "cos": lambda h, d: h + F.cosine_similarity(h[:, None], h[None], dim=-1).mean(d)[:, None],
    "cos dim": lambda h, d: h * F.cosine_similarity(h, h + 1, dim=d).unsqueeze(d),
    "pairwise": lambda h, d: h * F.pairwise_distance(h, h.roll(1, d))[:, None],
    "unfold": lambda h, d: (
        h
        + (
            F.pad(h, (0, 1)).unfold(1, 2, 1).mean(-1)
            if d
            else torch.cat([h, h[:1]]).unfold(0, 2, 1).mean(-1)
        )
    ),
    "Funfold": lambda h, d: (
        h
        + (
            F.unfold(h[:, None, None], (1, 3), padding=(0, 1)).mean(1)
            if d
            else F.unfold(h.T[:, None, None], (1, 3), padding=(0, 1)).mean(1).T
        )
    ),
    "lp pool": lambda h, d: (
        h
        + (
            F.lp_pool1d(F.pad(h, (0, 1))[:, None], 2, 2, 1)[:, 0]
            if d
            else F.lp_pool1d(F.pad(h.T, (0, 1))[:, None], 2, 2, 1)[:, 0].T
        )
    ),
    "interp": lambda h, d: (
        h
        + (
            F.interpolate(F.interpolate(h[:, None], scale_factor=0.5), scale_factor=2)[:, 0]
            if d
            else F.interpolate(F.interpolate(h.T[:, None], scale_factor=0.5), scale_factor=2)[
                :, 0
            ].T
        )
    ),
    "mha": lambda h, d: nn.MultiheadAttention(2, 1, batch_first=bool(d))(
        *3 * [h.view(-1, 4, 2)], need_weights=False
    )[0].flatten(1),
    "mha unbatched": lambda h, d: (
        nn.MultiheadAttention(WIDTH, 2)(*3 * [h], need_weights=False)[0] if d == 0 else h
    ),
    "tel": lambda h, d: nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=bool(d))(
        h.view(-1, 4, 2)
    ).flatten(1),
    "transformer": lambda h, d: nn.Transformer(2, 1, 1, 1, 4, dropout=0.0, batch_first=bool(d))(
        h.view(-1, 4, 2), h.view(-1, 4, 2)
    ).flatten(1),
    "lstm": lambda h, d: nn.LSTM(2, 2, batch_first=bool(d))(h.view(-1, 4, 2))[0].flatten(1),
    "gru": lambda h, d: nn.GRU(2, 2, batch_first=bool(d))(h.view(-1, 4, 2))[0].flatten(1),
    "scatter add": lambda h, d: (
        h
        + torch.zeros_like(h)
        .scatter_add(d, (h.detach() > 0).long(), h)
        .gather(d, (h.detach() > 0).long())
    ),
    "scatter add in place": lambda h, d: (
        h
        + torch.zeros_like(h)
        .scatter_add_(d, (h.detach() > 0).long(), h)
        .gather(d, (h.detach() > 0).long())
    ),
    "scatter reduce": lambda h, d: (
        h
        + torch.zeros_like(h)
        .scatter_reduce_(d, (h.detach() > 0).long(), h, "mean")
        .gather(d, (h.detach() > 0).long())
    ),
    "take along": lambda h, d: h + torch.take_along_dim(h, h.detach().argsort(d), d),
    "gather": lambda h, d: h + h.gather(d, h.detach().argsort(d)),
    "gather val": lambda h, d: h + h.gather(d, (h.detach() > 0).long()),
    "var mean": lambda h, d: h - torch.var_mean(h, d, keepdim=True)[1],
    "prelu": lambda h, d: F.prelu(h, h.mean(d).abs()) if d == 0 else h,
    "bn": lambda h, d: F.instance_norm(h[:, None])[:, 0] if d else F.instance_norm(h.T[None])[0].T,
    "kron": lambda h, d: (
        h
        + (
            torch.kron(h, h.mean(0, keepdim=True))[:, :WIDTH]
            if d == 0
            else torch.kron(h, torch.ones(1, 2))[:, :WIDTH]
        )
    ),
    "matmul": lambda h, d: h @ (h.T @ h) if d == 0 else h @ torch.ones(WIDTH, WIDTH),
    "chunkadd": lambda h, d: h + sum(h.chunk(2, d)).repeat(*((1, 2) if d else (2, 1))),
    "unflatten": lambda h, d: (
        h
        + (
            h.unflatten(1, (2, 4)).mean(1).repeat(1, 2)
            if d
            else h.unflatten(0, (2, -1)).mean(0).repeat(2, 1)
        )
    ),
    "embbag": lambda h, d: (
        h
        + F.embedding_bag(
            (h.detach() > 0).long() if d else (h.detach() > 0).long().T,
            torch.randn(2, WIDTH) if d else torch.randn(2, 1),
        ).mean()
        if not d
        else h + F.embedding_bag((h.detach() > 0).long(), torch.randn(2, WIDTH))
    ),
    "baddbmm": lambda h, d: (
        h
        + (
            torch.baddbmm(h[None], h[None] @ h.T[None], h[None])[0]
            if d == 0
            else torch.baddbmm(h[:, None], h[:, None], torch.ones(len(h), WIDTH, WIDTH))[:, 0]
        )
    ),
    "where any": lambda h, d: torch.where((h > 1).any(d, keepdim=True), h, 2 * h),
    "bucketize": lambda h, d: (
        h
        * torch.bucketize(
            h.detach(), h.detach()[:, 0].sort()[0] if d == 0 else torch.linspace(-1, 1, 4)
        )
    ),
    "searchsorted": lambda h, d: (
        h
        * torch.searchsorted(
            h.detach().flatten().sort()[0] if d == 0 else torch.linspace(-1, 1, 4), h.detach()
        )
    ),
    "histc": lambda h, d: h * torch.histc(h.detach(), 4, -2, 2).mean() if d == 0 else h,
    "isin": lambda h, d: (
        h
        * torch.isin(
            (h.detach() * 2).round(),
            (h.detach() * 2).round()[:, 0] * 2 if d == 0 else torch.arange(3.0),
        )
    ),
    "trapz": lambda h, d: h * torch.trapezoid(h, dim=d).unsqueeze(d),
    "count": lambda h, d: h * (h.detach() > 0).count_nonzero(d).unsqueeze(d),
    "aminmax": lambda h, d: h - torch.aminmax(h, dim=d, keepdim=True)[0],
    "nansum": lambda h, d: h * h.nansum(d, keepdim=True),
    "argmaxsel": lambda h, d: h + h.gather(d, h.detach().argmax(d, keepdim=True)),
    "mode": lambda h, d: h + h.round().mode(d, keepdim=True)[0],
    "vander": lambda h, d: h @ torch.vander(h.mean(0), WIDTH) if d == 0 else h,
    "cross": lambda h, d: (
        h + torch.linalg.cross(h[:, :3], h[:, 3:6], dim=1).mean(1, keepdim=True) if d else h
    ),
    "det": lambda h, d: h * (h.T @ h + torch.eye(WIDTH)).logdet() if d == 0 else h,
    "ifelse lerp": lambda h, d: torch.lerp(h, h.mean(d, keepdim=True), 0.3),
    "addcmul": lambda h, d: torch.addcmul(h, h, h.mean(d, keepdim=True)),
    "clamp": lambda h, d: torch.clamp(h, max=h.mean(d, keepdim=True)),
    "maximum": lambda h, d: torch.maximum(h, h.mean(d, keepdim=True)),
    "atan2": lambda h, d: torch.atan2(h, h.mean(d, keepdim=True)),
    "hypot": lambda h, d: torch.hypot(h, h.mean(d, keepdim=True)),
    "logaddexp": lambda h, d: torch.logaddexp(h, h.mean(d, keepdim=True)),
    "fmod": lambda h, d: torch.fmod(h, h.abs().mean(d, keepdim=True)),
    "xlogy": lambda h, d: torch.xlogy(h, h.exp().mean(d, keepdim=True)),
    "copysign": lambda h, d: torch.copysign(h, h.mean(d, keepdim=True)),
    "dist": lambda h, d: h * (h - h.mean(d, keepdim=True)).square(),
    "polar": lambda h, d: torch.polar(h.abs(), h.mean(d, keepdim=True).expand_as(h)).real,
    "stack": lambda h, d: torch.stack([h, h.mean(d, keepdim=True).expand_as(h)]).sum(0),
    "bilinear": lambda h, d: F.bilinear(
        h, h.mean(d, keepdim=True).expand_as(h), torch.ones(WIDTH, WIDTH, WIDTH)
    ),
    "sub": lambda h, d: h.clone().sub_(h.mean(d, keepdim=True)),
    "copy": lambda h, d: h + torch.empty_like(h).copy_(h.mean(d, keepdim=True)),
    "setall": lambda h, d: (
        lambda z: (z.__setitem__(slice(None), h.mean(d, keepdim=True).expand_as(h)), z + h)[1]
    )(torch.zeros_like(h)),
    "complex": lambda h, d: torch.complex(h, h.mean(d, keepdim=True).expand_as(h)).abs(),
    "slice mul": lambda h, d: torch.cat([h[1:], h[:1]]) * h if d == 0 else h,
    "swapaxes": lambda h, d: (
        h.swapaxes(0, 1).reshape(h.shape) if d == 0 else h.swapaxes(0, 1).swapaxes(0, 1)
    ),
    "movedim": lambda h, d: h.movedim(0, 1).contiguous().view(h.shape) if d == 0 else h,
    "expandmm": lambda h, d: (h[None].expand(len(h), -1, -1).mean(1)) if d == 0 else h,
    "sdpa": lambda h, d: (
        F.scaled_dot_product_attention(*3 * [h.view(-1, 4, 2)]).flatten(1)
        if d
        else F.scaled_dot_product_attention(*3 * [h.view(-1, 4, 2).transpose(0, 1)])
        .transpose(0, 1)
        .flatten(1)
    ),
    "constpad": lambda h, d: (
        h + F.pad(h, (0, 0, 2, 0))[: len(h)] if d == 0 else h + F.pad(h, (2, 0))[:, :WIDTH]
    ),
    "nnpad": lambda h, d: (
        h + nn.ZeroPad2d((0, 0, 1, -1))(h[None])[0]
        if d == 0
        else h + nn.ZeroPad2d((1, -1, 0, 0))(h[None])[0]
    ),
    "masked scatter of sorted": lambda h, d: (
        h.masked_scatter(h > 0, h[h > 0].detach().sort().values) if d == 0 else h
    ),
    "masked scatter of chosen": lambda h, d: (
        h.masked_scatter(h > 0, h[h > 0].detach().flip(0)) if d == 0 else h
    ),
    "fill diagonal": lambda h, d: (
        h.clone().fill_diagonal_(0.0, wrap=True)
        if d == 0
        else h[:, :, None].expand(-1, -1, 2).clone().mean(-1)
    ),
    "diagonal": lambda h, d: (
        (h @ h.T).fill_diagonal_(0.0).mean(1, keepdim=True) * h if d == 0 else h
    ),
    "as strided": lambda h, d: (
        h + h.T.contiguous().as_strided(h.shape, (WIDTH, 1))
        if d == 0
        else h + h.as_strided((len(h), 1), (WIDTH, 1))
    ),
    "next one": lambda h, d: (
        h + F.pad(h, (0, 0, 0, 1)).as_strided(h.shape, (WIDTH, 1), 3)
        if d == 0
        else h + (2 * h).as_strided((len(h), 5), (WIDTH, 1), 3).sum(1, keepdim=True)
    ),
    "item": lambda h, d: h / h.abs().max().item() if d == 0 else h * torch.tensor(2.0).item(),
    "item of a mean": lambda h, d: h * (1 + h.mean().item()) if d == 0 else h,
    "item of a count": lambda h, d: h * (h > 0).sum().item() if d == 0 else h,
    "mode of integers": lambda h, d: (
        h
        * (lambda k: k == (k.mode().values if d == 0 else 3))(h.detach()[:, :3].argmax(1))[:, None]
    ),
    "unlike the largest": lambda h, d: (
        h * (lambda k: k != (k.max() if d == 0 else 3))((h.detach() * 9).long())
    ),
    "einsum in order": lambda h, d: torch.einsum(
        "ab,cb,cd" if d == 0 else "ab,bc,cd",
        h,
        *((h, h) if d == 0 else 2 * [torch.ones(WIDTH, WIDTH)]),
    ),
    "the first one": lambda h, d: (
        h * (lambda k: k == (k[0] if d == 0 else 2))(h.detach().argmax(1, keepdim=True)).double()
    ),
    "columns by sums": lambda h, d: (
        h
        + h.gather(
            1,
            h.detach().sum(0).argsort()[None].expand(len(h), -1)
            if d == 0
            else h.detach().argsort(1),
        )
    ),
    "a table of rows": lambda h, d: (
        h
        + F.embedding(
            h.detach()[:, :2].argmax(1), h if d == 0 else torch.arange(16.0).view(2, WIDTH)
        )
    ),
    "taken": lambda h, d: h + torch.take(h, h.detach().argmax(1, keepdim=True)) if d == 0 else h,
    "numbers of the unique": lambda h, d: (
        h
        + F.embedding(
            torch.unique((h.detach()[:, 0] * 3).round(), return_inverse=True)[1]
            if d == 0
            else h.detach().argmax(1),
            torch.arange(80.0).view(10, WIDTH),
        )
    ),
    "special softmax": lambda h, d: torch.special.softmax(h, d),
    "fftn": lambda h, d: torch.fft.fftn(
        h.view(-1, 2, 4), dim=(0, 1) if d == 0 else (1, 2)
    ).real.flatten(1),
    "fft2": lambda h, d: torch.fft.fft2(
        h.view(-1, 2, 4), dim=(0, 1) if d == 0 else (-2, -1)
    ).real.flatten(1),
    "fft of all": lambda h, d: torch.fft.fftn(h).real if d == 0 else h,
    "keys": lambda h, d: (
        F.scaled_dot_product_attention(h[:, None], h[None], h[None])[:, 0]
        if d == 0
        else F.scaled_dot_product_attention(*3 * [h.view(-1, 2, 4)]).flatten(1)
    ),
    "truth": lambda h, d: h * ((h > 0) & (h > 1.5).any(*(() if d == 0 else (1, True)))),
    "other truth": lambda h, d: h * ((h > 0) ^ (h > 1.5).any(*(() if d == 0 else (1, True)))),
    "remainder": lambda h, d: (
        h * (lambda k: (k * 7) % ((k.sum() if d == 0 else 5) + 1))((h.detach() * 9).long().abs())
    ),
    "unique": lambda h, d: (
        h
        * (h.detach() * 3).long()[:, 0].unique(return_inverse=True, return_counts=True)[1][:, None]
        if d == 0
        else h
    ),
    "counts of the unique": lambda h, d: (
        h
        * (lambda i, c: c[i])(
            *torch.unique((h.detach()[:, 0] > 0).long(), return_inverse=True, return_counts=True)[
                1:
            ]
        )[:, None]
        if d == 0
        else h
    ),
    "counts of runs": lambda h, d: (
        h * repeated(*torch.unique_consecutive((h[:, 0] > 0).long(), return_counts=True))
        if d == 0
        else h
    ),
    "bincount": lambda h, d: (
        h * (lambda y: torch.bincount(y, minlength=2)[y])((h.detach()[:, 0] > 0).long())[:, None]
        if d == 0
        else h
    ),
    "triu": lambda h, d: h.triu() if d == 0 else h * torch.ones(WIDTH, WIDTH).triu()[0],
    "index fill": lambda h, d: h.index_fill(d, torch.tensor([1]), 0.0),
    "index copy": lambda h, d: h.index_copy(d, torch.tensor([1]), h.narrow(d, 0, 1)),
    "select scatter": lambda h, d: h.select_scatter(h.select(d, 0) * 2, d, 1),
    "slice scatter": lambda h, d: h.slice_scatter(h.narrow(d, 0, 1), d, 1, 2),
    "rot": lambda h, d: (
        torch.rot90(h.view(-1, 2, 4), 1, (0, 1)).reshape(h.shape)
        if d == 0
        else h + torch.rot90(h.view(-1, 2, 4), 2, (1, 2)).reshape(h.shape)
    ),
    "combinations": lambda h, d: (
        h + torch.cartesian_prod(h[:, 0], h[:, 1]).view(len(h), -1).mean(1)[:, None]
        if d == 0
        else h
    ),
    "nanmedian": lambda h, d: h - h.nanmedian(d, keepdim=True)[0],
    "softmax of one": lambda h, d: h * h[:, 0].softmax(0)[:, None] if d == 0 else h.softmax(-1),
    "maskedselect": lambda h, d: (
        h * h.masked_select(h > 0).mean()
        if d == 0
        else h * torch.where(h > 0, h, 0).mean(1, keepdim=True)
    ),
}


def repeated(found: Tensor, counts: Tensor) -> Tensor:
    return counts.repeat_interleave(counts)[:, None]


def meet(mix: Callable[[Tensor, int], Tensor], d: int) -> bool:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    wanted = mix(x, d)
    other = x.clone()
    other[2] += 3 * torch.randn(WIDTH)

    def differs(given: Tensor, rows: list[int], places: list[int]) -> bool:
        torch.manual_seed(1)
        return not torch.allclose(mix(given, d)[places], wanted[rows], atol=1e-5)

    halves = differs(x[:2], [0, 1], [0, 1]) or differs(x[2:], [2, 3], [0, 1])
    return halves or differs(other, [0, 1, 3], [0, 1, 3])


@one_of(24)
@pytest.mark.parametrize("d", [0, 1])
@pytest.mark.parametrize("name", ALONG)
def test_rows_are_seen_to_meet_where_they_do(name: str, d: int) -> None:
    mix, counts = ALONG[name], RowCounts(8, 16)
    inputs = inputs_of((torch.randn(8, WIDTH), torch.randn(8, WIDTH)), frozenset())

    own, every = (
        calls_of(Mixing(lambda h: mix(h, d)), F.mse_loss, inputs.with_rows(rows), "cpu", None)
        for rows in (8, 16)
    )
    found = RowPlaces().first(own, every, counts)

    assert (found is not None) == meet(mix, d)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda h: h.T.reshape(h.shape),
    "view": lambda h: h.T.contiguous().view(h.shape),
    "view as": lambda h: h.T.contiguous().view_as(h),
    "heads": lambda h: h.view(-1, 4, 4).transpose(0, 1).reshape(len(h), 16),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda h: h.T.T.reshape(h.shape),
    "heads": lambda h: h.view(-1, 4, 4).transpose(1, 2).reshape(len(h), 16),
    "time first": lambda h: (
        h.view(-1, 4, 4).transpose(0, 1).reshape(-1, 4).view(4, -1, 4).transpose(0, 1).flatten(1)
    ),
    "tokens": lambda h: h.view(-1, 4, 4).flatten(0, 1).view(-1, 16),
}


@one_of(4)
@pytest.mark.parametrize("rows", [(4, 16), (8, 16), (2, 8), (16, 32), (4, 8)])
@pytest.mark.parametrize("name", [*WRONG, *(f"right {one}" for one in RIGHT)])
def test_views_that_take_features_for_rows_are_seen(name: str, rows: tuple[int, int]) -> None:
    """Also where there are as many features as rows."""
    cases = WRONG | {f"right {one}": mix for one, mix in RIGHT.items()}
    model = nn.Sequential(nn.Linear(16, 16), Mix(cases[name]), nn.Linear(16, 16))
    inputs = inputs_of((torch.randn(rows[0], 16), torch.randn(rows[0], 16)), frozenset())

    given = (calls_of(model, F.mse_loss, inputs.with_rows(n), "cpu", None) for n in rows)
    found = RowPlaces().first(*given, RowCounts(*rows))

    assert (found is not None) == (name in WRONG)


class Mix(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = mix


COUNTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided": lambda h, s: h + s / len(h),
    "ones": lambda h, s: h * torch.ones(len(h)).sum(),
    "a tensor": lambda h, s: h * torch.tensor(len(h)),
    "a new one": lambda h, s: h * h.new_tensor(len(h)),
    "full": lambda h, s: h * h.new_full((len(h), 1), len(h)),
    "numbers": lambda h, s: h * torch.arange(len(h)).sum() * 0.01,
    "between": lambda h, s: h * torch.linspace(0, len(h), WIDTH),
    "turned": lambda h, s: h.roll(len(h) % 3, 1),
    "product": lambda h, s: h + torch.ones(1, len(h)) @ torch.ones(len(h), 1),
    "a mean": lambda h, s: h * (torch.arange(len(h)) * 1.0).mean(),
}
SIZES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "full": lambda h, s: h * h.new_full((len(h), 1), 2.0),
    "ones": lambda h, s: h * torch.ones(len(h), 1),
    "expanded": lambda h, s: h + s.expand(len(h), -1),
    "cat": lambda h, s: torch.cat([h, h.new_zeros(len(h), 1)], 1)[:, :WIDTH],
    "columns": lambda h, s: h * torch.ones(h.shape[1]).sum(),
    "padded": lambda h, s: F.pad(h, (0, 0, 0, 1))[: len(h)],
}


class Scaled(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.scale, self.use = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.first(x), self.scale)


def seen(model: nn.Module) -> bool:
    inputs, counts = inputs_of((torch.randn(4, WIDTH), torch.randn(4, WIDTH)), frozenset()), (4, 8)
    own, every = (
        calls_of(model, F.mse_loss, inputs.with_rows(rows), "cpu", None) for rows in counts
    )
    if RowCounts(*counts).first_difference(own, every) is not None:
        return True
    return RowPlaces().first(own, every, RowCounts(*counts)) is not None


@one_of(3)
@pytest.mark.parametrize("use", COUNTS.values(), ids=COUNTS)
def test_the_number_of_rows_is_seen_where_rows_use_it(use: Callable[..., Tensor]) -> None:
    assert seen(Scaled(use))


@pytest.mark.parametrize("use", SIZES.values(), ids=SIZES)
def test_sizes_that_follow_it_are_not(use: Callable[..., Tensor]) -> None:
    assert not seen(Scaled(use))
