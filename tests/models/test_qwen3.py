"""The reference Qwen3: its stages, its options, and that it learns."""

import pytest
import torch
from capture.interpreter import assert_parity
from plain_loop import plain_losses

from piper.capture import capture
from piper.models.llama import cross_entropy
from piper.models.qwen3 import Qwen3, Qwen3Config


@pytest.mark.soak
def test_stages_do_what_the_model_does() -> None:
    model = Qwen3(Qwen3Config(layers=2, heads=2, kv_heads=1, head_dim=24, tied=True), stages=2)
    batch = torch.randint(128, (2, 4)), torch.randint(128, (2, 4))

    captured = capture(model, cross_entropy, batch)

    assert [region.id for region in captured.model.regions] == ["PP0", "PP1"]
    assert captured.aliases == {"head.weight": "embedding.weight"}
    assert captured.model.by_id["PP1"].inputs == ("PP0/0", "batch:1")
    assert_parity(captured, model, cross_entropy, batch)


def test_heads_are_as_wide_as_the_config_says() -> None:
    model = Qwen3(Qwen3Config(dim=32, heads=4, kv_heads=2, head_dim=16))

    attention = model.blocks[0].attention

    assert attention.query.weight.shape == (64, 32)
    assert attention.key.weight.shape == (32, 32)
    assert attention.out.weight.shape == (32, 64)


def test_queries_and_keys_are_normalised_so_their_scale_does_not_matter() -> None:
    torch.manual_seed(0)
    model, tokens = Qwen3(Qwen3Config(layers=1)).double(), torch.randint(128, (1, 8))
    before = model(tokens)

    for linear in (model.blocks[0].attention.query, model.blocks[0].attention.key):
        linear.weight.data *= 1000

    torch.testing.assert_close(model(tokens), before, rtol=1e-2, atol=1e-5)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="layers=4 cannot be cut into stages=5"):
        Qwen3(Qwen3Config(layers=4), stages=5)


def test_it_learns_a_sequence_by_heart() -> None:
    torch.manual_seed(0)
    model = Qwen3(Qwen3Config(vocab=16, layers=1, kv_heads=2))
    tokens = torch.randperm(16)[:9].unsqueeze(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [(tokens[:, :-1], tokens[:, 1:])] * 60

    losses = plain_losses(optimizer, batches, lambda x, y: cross_entropy(model(x), y))

    assert losses[-1] < 0.1 < 2 < losses[0]


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model = Qwen3(Qwen3Config())
    tokens = torch.randint(128, (1, 8))

    whole, part = model(tokens), model(tokens[:, :5])

    torch.testing.assert_close(whole[:, :5], part)
