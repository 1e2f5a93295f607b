"""nn.TransformerEncoder and its decoder with masks as tutorials write them, without is_causal."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from draws import levels_of, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.strategies import one_f_one_b

WIDTH, TOKENS = 8, 5
SGD = partial(torch.optim.SGD, lr=0.1)
causal = nn.Transformer.generate_square_subsequent_mask
MASKS: dict[str, Callable[[], Tensor]] = {
    "causal": lambda: causal(TOKENS, dtype=torch.float64),
    "not causal": lambda: causal(TOKENS, dtype=torch.float64).T,
    "truths": lambda: torch.ones(TOKENS, TOKENS).triu(1).bool(),
    "a bias": lambda: torch.arange(TOKENS**2).view(TOKENS, TOKENS).double() / 10,
}


class Net(nn.Module):
    def __init__(self, mask: Callable[[], Tensor], decoder: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mask = nn.Embedding(9, WIDTH), mask
        kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
        layer = kind(WIDTH, 2, 16, 0.0, batch_first=True)
        stack: type[nn.Module] = nn.TransformerDecoder if decoder else nn.TransformerEncoder
        self.stack, self.last = stack(layer, 1), nn.Linear(WIDTH, 9)
        self.decoder = decoder
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        found = (
            self.stack(x, x, tgt_mask=self.mask()) if self.decoder else self.stack(x, self.mask())
        )
        return self.last(found).transpose(1, 2)


@one_of(4)
@pytest.mark.parametrize(("name", "decoder"), levels_of(MASKS, [False, True]))
def test_masks_without_a_hint_train_as_without_piper(name: str, decoder: bool) -> None:
    model = Net(MASKS[name], decoder)
    plain = deepcopy(model)
    torch.manual_seed(1)
    batches = [tuple(torch.randint(9, (2, 4, TOKENS))) for _ in range(2)]

    found = rehearse(
        model, F.cross_entropy, one_f_one_b(pp=1, microbatches=2), batches, optimizer=SGD
    )

    wanted = plain_losses(
        SGD(plain.parameters()), batches, lambda x, y: F.cross_entropy(plain(x), y)
    )
    assert found.losses == pytest.approx(wanted, rel=1e-10)
    for key, value in plain.named_parameters():
        torch.testing.assert_close(found.parameters[key], value.detach(), rtol=1e-9, atol=1e-10)
