"""nn.TransformerEncoder with padding: without gradients, torch leaves out what a mask hides."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, where
from piper.capture.trace.replaced import transformer_private

SGD = partial(torch.optim.SGD, lr=0.1)
LENGTHS = 6, 3, 5, 2


class Net(nn.Module):
    """Its outputs at padded positions count: they are zeros, or what an ordinary encoder gives."""

    def __init__(self, normed: bool = False, floats: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(12, 8)
        self.encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(8) if normed else None)
        self.last = nn.Linear(8, 3)
        self.floats, self.frozen = floats, frozen
        if frozen:
            self.encoder.requires_grad_(False).eval()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        padding = x == 0
        given = padding.double().masked_fill(padding, float("-inf")) if self.floats else padding
        with torch.set_grad_enabled(not self.frozen and torch.is_grad_enabled()):
            found = self.encoder(self.embedding(x), src_key_padding_mask=given)
        result: Tensor = self.last(found).sum(1)
        return result


def batches(side: str) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        x = torch.randint(1, 12, (4, 6))
        for row, length in enumerate(LENGTHS):
            left = side == "left" or (side == "mixed" and row > 1)
            x[row, slice(6 - length) if left else slice(length, None)] = 0
        found.append((x, torch.randint(3, (4,))))
    return found


def trainer(model: Net, parts: int, side: str) -> Trainer:
    strategy = [Place(where(), [0]), Split("MB", parts)]
    return Trainer(model, F.cross_entropy, strategy, example=batches(side)[0], optimizer=SGD)


@pytest.mark.parametrize(
    "parts, side, normed, floats",
    [
        (1, "right", True, False),
        (1, "left", False, False),
        (1, "mixed", False, True),
        (2, "right", False, True),
        (2, "left", True, False),
    ],
)
def test_they_evaluate_as_in_plain_pytorch(
    parts: int, side: str, normed: bool, floats: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = batches(side)
    with trainer(Net(normed, floats), parts, side) as one:
        found = float(one.evaluate(given[:1]).loss)
        answers = one.predict(given[0][0])
    plain = Net(normed, floats).eval()
    with torch.no_grad():
        wanted = plain(given[0][0])
    loss = F.cross_entropy(wanted, given[0][1])

    torch.testing.assert_close(answers, wanted)
    assert found == pytest.approx(float(loss))
    assert "meet" not in caplog.text


@pytest.mark.parametrize("parts, side", [(1, "left"), (2, "right")])
def test_a_frozen_one_trains_the_rest_as_in_plain_pytorch(parts: int, side: str) -> None:
    with trainer(Net(frozen=True), parts, side) as one:
        found = [float(one.step(*batch).loss) for batch in batches(side)]
    plain = Net(frozen=True)
    used = [one for one in plain.parameters() if one.requires_grad]
    wanted = plain_losses(SGD(used), batches(side), lambda x, y: F.cross_entropy(plain(x), y))

    torch.testing.assert_close(found, wanted)


def test_each_microbatch_decides_for_its_rows_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rows with padding at either side, which plain PyTorch then computes with."""
    transformer_private.say_who_decides.cache_clear()
    x, _ = batches("mixed")[0]
    with trainer(Net(), 2, "mixed") as one, caplog.at_level("INFO", "piper"):
        found = one.predict(x)
    plain = Net().eval()
    with torch.no_grad():
        wanted = torch.cat([plain(part) for part in x.chunk(2)])

    torch.testing.assert_close(found, wanted)
    assert "pad all rows at the same side" in caplog.text


class Biased(nn.Module):
    """Attention that is weaker for tokens further away, as a mask of numbers says."""

    table: Tensor

    def __init__(self, many: int = 0, hooked: bool = False, norm_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.embedding = nn.Embedding(12, 8)
        self.layer = nn.TransformerEncoder(layer, many) if many else layer
        if hooked:
            layer.linear1.register_forward_hook(lambda *given: None)
        self.last = nn.Linear(8, 3)
        apart = (torch.arange(6)[:, None] - torch.arange(6)).abs()
        self.register_buffer("table", -0.5 * apart)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.layer(self.embedding(x), self.table)).sum(1)
        return result


@pytest.mark.parametrize(
    "given", [{}, {"many": 2}, {"hooked": True}, {"norm_first": True}], ids=str
)
def test_masks_of_numbers_evaluate_as_in_plain_pytorch(given: dict[str, Any]) -> None:
    """Without gradients, torch takes them for masks of bools."""
    x, y = batches("right")[0]
    strategy = [Place(where(), [0]), Split("MB", 2)]
    example: dict[str, Any] = {"example": (x, y), "optimizer": SGD}
    with Trainer(Biased(**given), F.cross_entropy, strategy, **example) as one:
        found = one.predict(x)
        trained = one.step(x, y).loss
    plain = Biased(**given)
    with torch.no_grad():
        wanted = plain.eval()(x)

    torch.testing.assert_close(found, wanted)
    assert trained == pytest.approx(F.cross_entropy(plain.train()(x), y).item())
