"""A Llama with ring attention: losses and gradients, work and memory of each device."""

from __future__ import annotations

from functools import cache
from math import prod

import pytest
import torch
from capture.division.devices import Devices
from capture.division.models import VOCABULARY, cross_entropy, drawn, llama
from capture.interpreter import eager
from torch import Tensor, nn

from piper.capture import Captured, capture
from piper.ir.model import Model
from piper.ir.placement.division import DivisionRequest
from piper.ir.placement.placements import Step
from piper.ir.values import Role, TensorSpec
from piper.names import B, F

SOAK = pytest.mark.soak
ROWS, OWN, HEADS, WIDTH, BYTES = 3, 4, 4, 4, 8  # tokens of a device; features of a head


def batch(tokens: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    rand = (torch.randint(0, VOCABULARY, (ROWS, tokens), generator=draw) for _ in range(2))
    return tuple(rand)


@cache
def model() -> nn.Module:
    return drawn(llama(layers=1))


@cache
def divided(ways: int, kind: str | None) -> Captured:
    """Each device has `OWN` tokens, however many devices there are."""
    request = DivisionRequest(regions=("PP0",), ways=ways, what="tokens", attention=kind)
    requests = [request] if ways > 1 else []
    return capture(model(), cross_entropy, batch(ways * OWN), divide=requests)


@pytest.mark.parametrize(
    ("ways", "kind"),
    [pytest.param(*one, marks=() if one == (2, "zigzag") else SOAK) for one in
     ((2, "ring"), (2, "zigzag"), (4, "ring"), (4, "zigzag"), (8, "zigzag"))],
)  # fmt: skip
def test_a_ring_trains_as_one_device(ways: int, kind: str) -> None:
    given = batch(ways * OWN)
    expected = eager(model(), cross_entropy, given)

    devices = Devices(divided(ways, kind), model(), ways)
    loss, gradients = devices.step(given)

    torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=0)
    scale = max(float(gradient.abs().max()) for gradient in expected[1].values())
    torch.testing.assert_close(gradients, expected[1], rtol=0, atol=1e-12 * scale)
    pair = ROWS * HEADS * OWN * 2 * WIDTH * BYTES  # keys and values of a device
    assert devices.sent[Step.SHIFT] == (ways - 1) * pair
    # Gradients, and keys and values again for all blocks but the first and the last.
    assert devices.sent[Step.SHIFT_BACK] == (ways - 1 + ways - 2) * pair


def work(captured: Captured, phase: str) -> float:
    return sum(region.flops.get(phase, 0.0) for region in captured.model.regions)


def attention(queries: int, keys: int) -> int:
    """Operations of the forward: products with keys and with values."""
    return 4 * ROWS * HEADS * queries * keys * WIDTH


@pytest.mark.parametrize("ways", [4, *(pytest.param(n, marks=SOAK) for n in (2, 8))])
def test_a_zigzag_divides_causal_attention_evenly(ways: int) -> None:
    """All devices run the same code, so what one computes is what each of them does."""
    zigzag = divided(ways, "zigzag")
    alone = divided(1, None)

    rest = work(alone, F) - attention(OWN, OWN)
    blocks = attention(OWN, OWN) + (ways - 1) * 2 * attention(OWN // 2, OWN // 2)
    assert work(zigzag, F) == rest + blocks
    assert work(zigzag, B) == work(alone, B) - 2 * attention(OWN, OWN) + 2 * blocks


@SOAK
def test_a_plain_ring_computes_every_block() -> None:
    ring, alone = divided(4, "ring"), divided(1, None)

    assert work(ring, F) == work(alone, F) + 3 * attention(OWN, OWN)


def kept(model: Model) -> int:
    """Bytes that a device keeps from forwards to backwards, without the batch."""
    every = {r.inputs[k] for r in model.regions for k in r.backward_inputs}
    read = [value for value in every if model.values[value].role is not Role.BATCH]
    specs = [spec for region in model.regions for spec in region.saved]
    specs += [spec for value in read for spec in model.values[value].specs]
    return sum(map(nbytes, specs))


def nbytes(spec: TensorSpec) -> int:
    return prod(size or 0 for size in spec.shape) * getattr(torch, spec.dtype).itemsize


@SOAK
@pytest.mark.parametrize("kind", ["ring", "zigzag"])
def test_memory_of_a_device_does_not_grow_with_the_sequence(kind: str) -> None:
    """Twice the tokens on twice the devices: each keeps a few numbers more for each query.

    What a block more keeps: the largest scores, and the factors by which sums are scaled. The loss
    sums the vocabulary in as many slices as there are devices.
    """
    four, eight = (kept(divided(ways, kind).model) for ways in (4, 8))

    column = ROWS * HEADS * OWN * BYTES
    block = {"ring": 3 * column, "zigzag": 4 * column + 1}[kind]
    slices = ROWS * OWN * BYTES
    assert eight - four == 4 * (block + slices)
