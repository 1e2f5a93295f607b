"""Operators that read memory as it lies, in divided regions and behind them."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Shard, Split, Strategy, annotate, rehearse, where
from piper.capture import capture
from piper.errors import CaptureError

WIDTH, TOKENS, ROWS = 8, 8, 4
SGD = partial(torch.optim.SGD, lr=0.1)


def transposed(h: Tensor) -> Tensor:
    """The transposed tensor's memory, read as if nothing had happened."""
    rows, tokens, width = h.shape
    return h.transpose(1, 2).as_strided(h.shape, (tokens * width, width, 1))


def overlapping(h: Tensor) -> Tensor:
    """Pairs of neighbours, as Longformer reads its chunks."""
    rows, tokens, width = h.shape
    pairs = h.as_strided((rows, tokens - 1, 2 * width), (tokens * width, width, 1))
    return functional.pad(pairs[..., :width] + pairs[..., width:], (0, 0, 0, 1))


def shifted(h: Tensor) -> Tensor:
    rows, tokens, width = h.shape
    later = h.mT.as_strided((rows, tokens - 1, width), (tokens * width, width, 1), width)
    return functional.pad(later, (0, 0, 0, 1))


def written(copy: Tensor) -> Tensor:
    """The first feature of each token is twice as large, in place."""
    rows, tokens, width = copy.shape
    copy.as_strided((rows, tokens), (tokens * width, width)).mul_(2)
    return copy


def few_queries(h: Tensor) -> Tensor:
    """Attention transposes what it reads, and its result is viewed as it lies."""
    q, k = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (h[:, :3], h))
    found = functional.scaled_dot_product_attention(q, k, k).transpose(1, 2)
    return functional.pad(found.flatten(2), (0, 0, 0, h.shape[1] - 3))


def turned(h: Tensor) -> Tensor:
    pairs = torch.view_as_complex(h.unflatten(-1, (-1, 2)).transpose(1, 2))
    return torch.view_as_real(pairs * (1 + 2j)).transpose(1, 2).flatten(2)


def outside(h: Tensor) -> Tensor:
    """The first rows, and then memory of the others."""
    rows, tokens, width = h.shape
    return h[:1].as_strided((rows, tokens, width), (tokens * width, width, 1))


class Net(nn.Module):
    def __init__(self, reads, behind: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.reads, self.behind = reads, behind
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("L"):
            h = functional.gelu(self.first(x))
            h = h.mT.contiguous().mT if self.behind else self.reads(h)
        with annotate("L"):
            return self.last(self.reads(h) if self.behind else h)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw, size = torch.Generator().manual_seed(1), (ROWS, TOKENS, WIDTH)
    rand = partial(torch.randn, size, generator=draw, dtype=torch.float64)
    return [(rand(), rand()) for _ in range(2)]


def agree(reads, what: str, ways: int, behind: bool = False) -> None:
    model, devices = Net(reads, behind).double(), list(range(ways))
    here = where(L=0) if behind else where()
    program = [Place(where(), devices), Shard(here, devices, what=what), Split("MB", 2)]
    plain = deepcopy(model)

    found = rehearse(model, functional.mse_loss, Strategy(program), batches(), optimizer=SGD)

    optimizer = SGD(plain.parameters())
    wanted = plain_losses(optimizer, batches(), lambda x, y: functional.mse_loss(plain(x), y))
    assert found.losses == pytest.approx(wanted, rel=1e-12)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach())


soak = pytest.mark.soak
FORMS = [transposed, *(pytest.param(form, marks=soak) for form in (overlapping, shifted, turned))]


@pytest.mark.parametrize("what", ["weights", pytest.param("tokens", marks=soak)])
@pytest.mark.parametrize("reads", FORMS)
def test_memory_is_read_as_in_plain_pytorch(reads, what: str) -> None:
    agree(reads, what, 2)


@pytest.mark.parametrize("reads", [few_queries, pytest.param(transposed, marks=soak)])
def test_memory_of_gathered_tokens_is_read_as_in_plain_pytorch(reads) -> None:
    agree(reads, "tokens", 4)


@pytest.mark.parametrize("reads", [overlapping, pytest.param(few_queries, marks=soak)])
def test_a_region_behind_a_divided_one_reads_memory_as_in_plain_pytorch(reads) -> None:
    agree(reads, "weights", 2, behind=True)


def test_memory_of_other_tensors_is_refused() -> None:
    with pytest.raises(CaptureError) as refused:
        agree(outside, "weights", 2)

    assert "as_strided reads memory outside of its tensor" in str(refused.value)
    assert "test_divided_layouts.py" in str(refused.value)


@pytest.mark.parametrize("copied", [torch.clone, lambda h: h.mT.clone()])
def test_writes_by_memory_are_refused(copied) -> None:
    """Without any division: torch's own derivative of them is wrong."""
    model = Net(lambda h: written(copied(h)), False).double()

    with pytest.raises(CaptureError) as refused:
        capture(model, functional.mse_loss, batches()[0])

    assert "what as_strided returns is written to in place" in str(refused.value)
