"""Captured models compute what plain PyTorch computes, bit by bit."""

import pytest
import torch
from capture.interpreter import assert_parity
from small_models import Skips, squared_error

from piper.capture import capture
from piper.models.llama import Llama, LlamaConfig, cross_entropy


def tokens(batch: int = 2, time: int = 8, vocab: int = 128) -> torch.Tensor:
    return torch.randint(vocab, (batch, time))


@pytest.mark.soak  # by default, test_huggingface.py has a Llama in stages
@pytest.mark.parametrize("options", [{}, {"tied": True, "kv_heads": 2}])
def test_llama_in_four_stages(options: dict) -> None:
    model = Llama(LlamaConfig(**options), stages=4)
    batch = (tokens(), tokens())

    captured = capture(model, cross_entropy, batch)

    assert [region.id for region in captured.model.regions] == ["PP0", "PP1", "PP2", "PP3"]
    assert_parity(captured, model, cross_entropy, batch)


def test_skip_connections_across_regions() -> None:
    model = Skips(depth=2)
    batch = (torch.randn(4, 16), torch.randn(4, 16))

    captured = capture(model, squared_error, batch)

    assert captured.model.by_id["PP3"].inputs == ("PP2/0", "PP0/0", "batch:1")
    assert_parity(captured, model, squared_error, batch)
