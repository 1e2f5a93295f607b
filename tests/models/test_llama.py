"""The reference Llama: its stages, its options, and that it learns."""

import pytest
import torch

from piper.capture import capture
from piper.models.llama import Llama, LlamaConfig, cross_entropy


@pytest.mark.parametrize("stages", [1, 3, 4])
def test_layers_are_spread_over_stages(stages: int) -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig(layers=4), stages)
    tokens = torch.zeros(1, 4, dtype=torch.long)

    captured = capture(model, cross_entropy, (tokens, tokens))

    assert [region.id for region in captured.model.regions] == [f"PP{i}" for i in range(stages)]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="4 layers cannot be cut into 5 stages"):
        Llama(LlamaConfig(layers=4), stages=5)


def test_a_tied_head_is_the_embedding() -> None:
    model = Llama(LlamaConfig(tied=True))

    assert model.head.weight is model.embedding.weight


def test_it_learns_a_sequence_by_heart() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab=16, layers=1, kv_heads=2))
    tokens = torch.randint(16, (1, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    for _ in range(60):
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < 0.1 < 2 < losses[0]


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model = Llama(LlamaConfig())
    tokens = torch.randint(128, (1, 8))

    whole, part = model(tokens), model(tokens[:, :5])

    torch.testing.assert_close(whole[:, :5], part)
