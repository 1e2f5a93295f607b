"""More blocks for a search by `job/test_model_search.py`: numbers of rows in Python code, flags,
contexts, caches, conversions, aliases, and layouts of rows and time."""

from __future__ import annotations

import contextvars
import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import numpy
import torch
from searched_blocks import IDS, D, Layer, T, block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

linear = partial(nn.Linear, D, D)
DEPTH: contextvars.ContextVar[float] = contextvars.ContextVar("depth", default=0.5)


# Numbers of rows in Python


@block()
def more_than_five(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w if len(x) > 5 else x @ s.u


@block()
def at_most_six(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w * min(x.shape[0], 6) / 6


@block()
def a_multiple_of_four(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return (x if x.size(0) % 4 else x.flip(-1)) @ s.w


@block()
def first_six(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return torch.cat([x[:6] @ s.w, x[6:] @ s.u])


@block()
def in_blocks_of_four(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return torch.cat([part @ s.w for part in x.split(4)])


@block()
def each_row_by_itself(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return torch.stack([x[i] @ (s.w if i < 7 else s.u) for i in range(x.shape[0])])


@block()
def coarse_if_many(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x.to(torch.float32 if len(x) > 4 else x.dtype).to(x.dtype) @ s.w


@block()
def detached_if_many(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ (s.w.detach() if len(ids) > 4 else s.w) + x @ s.u


@block()
def no_grad_if_many(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    with torch.no_grad() if keep.shape[0] > 7 else nullcontext():
        scale = (x @ s.w).sigmoid()
    return scale * (x @ s.u)


@block()
def all_tokens(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return (x @ s.w).relu() if x.numel() > 6 * T * D else (x @ s.w).tanh()


@block()
def a_match(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    match x.shape:
        case (1 | 2 | 3, _, _):
            return x @ s.w
        case _:
            return x @ s.u


@block()
def padded_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    """Rows up to the next multiple of four, which are cut off again."""
    return (F.pad(x, (0, 0, 0, 0, 0, -len(x) % 4)) @ s.w)[: len(x)]


@lru_cache(maxsize=8)
def by_shape(rows: int, length: int) -> Tensor:
    return torch.linspace(0, 1, length, dtype=torch.float64).repeat(rows, 1)[..., None]


@block()
def cached_by_shape(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w + by_shape(x.shape[0], x.shape[1])


@block(sizes=dict)
def kept_by_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    if len(x) not in s.sizes:
        s.sizes[len(x)] = torch.full((1,), 1.0 / len(x), dtype=x.dtype)
    return x @ s.w * s.sizes[len(x)]


@block()
def numbers_of_numpy(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    ramp = torch.from_numpy(numpy.arange(x.shape[0] * T, dtype=numpy.float64) % T)
    return x @ s.w + 0.1 * ramp.view(x.shape[0], T, 1)


@block()
def a_generator(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    def steps() -> Iterator[Tensor]:
        for t in range(T):
            yield x[:, t] @ (s.w if t % 2 else s.u)

    return torch.stack(list(steps()), 1)


# Values as Python numbers


@block()
def an_item(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w * (1 + s.s.item())


@block()
def a_list(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x[:, : max(ids[0].tolist()) + 1].sum(1, keepdim=True) + x @ s.w


@block()
def through_numpy(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w + torch.from_numpy(x.detach().numpy().cumsum(1))


@block()
def through_a_float(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w * float(keep.any())


@block()
def any_kept(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w if keep.any() else x @ s.u


# Flags and contexts


@block()
def in_training(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ (s.w if s.training else s.u)


@block()
def grad_enabled(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w if torch.is_grad_enabled() and x.requires_grad else x @ s.u


@block()
def switched_to_eval(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    s.eval()
    out = F.dropout(x @ s.w, 0.5, training=s.training)
    s.train()
    return out


@block()
def other_default_type(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    out = x @ s.w + torch.ones(T, 1)
    torch.set_default_dtype(before)
    return out


@block()
def on_a_device(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    with torch.device(x.device):
        return x @ s.w + torch.linspace(0, 1, T, dtype=x.dtype)[:, None]


@block()
def a_context_variable(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    token = DEPTH.set(DEPTH.get() * 2)
    try:
        return x @ s.w * DEPTH.get()
    finally:
        DEPTH.reset(token)


@block()
def a_context_variable_that_grows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    s.runs = getattr(s, "runs", 0) + 1
    return x @ s.w * (1 + 0.1 * s.runs)


@dataclasses.dataclass
class Options:
    scale: float = 0.5
    steps: int = 0


@block(options=Options)
def changed_options(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    s.options = dataclasses.replace(s.options, steps=s.options.steps + 1)
    return x @ s.w * s.options.scale


@block(options=Options)
def read_and_changed_options(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    s.options.scale *= 0.9
    return x @ s.w * s.options.scale


@block(one=linear)
def a_weak_reference(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    found = weakref.ref(s.one)()
    return found(x) if found is not None else x


# Writes and aliases


@block()
def writes_to_its_input(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:] += x[:, :-1].clone()
    return x.mul_(2) @ s.w


@block()
def writes_to_ids(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    ids = ids.clone().clamp_(max=IDS - 2).add_(1)
    return x @ s.w + s.table(ids)


@block()
def an_alias(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x.view_as(x)


@block()
def a_view_of_time(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x.as_strided(x.shape, x.stride()) @ s.w


@block()
def unfolded(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1) @ s.w


# Layouts of rows and time


@block()
def rows_and_time_merged(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return (x.reshape(-1, D) @ s.w).reshape(x.shape)


@block(one=lambda: nn.MultiheadAttention(D, 2))
def time_first_attention(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    h = x.transpose(0, 1)
    return s.one(h, h, h, need_weights=False)[0].transpose(0, 1)


@block(one=lambda: nn.MultiheadAttention(D, 2))
def rows_taken_for_time(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.one(x, x, x, need_weights=False)[0]


@block(one=lambda: nn.GRU(D, D))
def time_first_gru(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.one(x.transpose(0, 1))[0].transpose(0, 1)


@block(one=lambda: nn.RNN(D, D, batch_first=True, nonlinearity="relu"))
def packed(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    lengths = torch.full((len(x),), T)
    out, _ = s.one(rnn.pack_padded_sequence(x, lengths, batch_first=True))
    return rnn.pad_packed_sequence(out, batch_first=True)[0]


@block()
def merged_and_shifted(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    """Rows meet at their ends."""
    return x.reshape(-1, D).roll(1, 0).view_as(x) @ s.w


@block()
def outer_product_of_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return torch.einsum("btd,cte->btd", x, x.tanh()) @ s.w / 8


# Other tensors and tools


@block()
def sparse_weights(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return torch.sparse.mm(s.w.relu().to_sparse(), x.reshape(-1, D).T).T.view_as(x)


@block()
def nested(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    made = torch.nested.nested_tensor(list(x), layout=torch.jagged)
    return torch.nested.to_padded_tensor(made @ s.w, 0.0)


@block()
def fake_quantized(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    w = torch.fake_quantize_per_tensor_affine(s.w.float(), 0.05, 0, -128, 127)
    return x @ w.to(x.dtype)


@block()
def straight_through(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ (s.w + (s.w.sign() - s.w).detach())


@block(one=lambda: nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh()))
def checkpointed_in_two(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return checkpoint_sequential(s.one, 2, x, use_reentrant=False)


@block(one=linear)
def checkpointed_by_rows(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    how = partial(checkpoint, use_reentrant=False) if len(x) > 5 else lambda f, h: f(h)
    return how(s.one, x)


@block(one=lambda: torch.compile(linear(), backend="eager"))
def compiled_inside(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return s.one(x)


@block()
def autocast_inside(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=len(x) > 1000):
        return x @ s.w


@block()
def sorted_times(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    order = ids.argsort(stable=True, dim=1)
    return torch.take_along_dim(x, order[..., None], 1) @ s.w


class Named(dict[str, Any]):
    __getattr__ = dict.__getitem__


@block(names=lambda: Named(scale=0.3))
def an_own_dict(s: Layer, x: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    return x @ s.w * s.names.scale
