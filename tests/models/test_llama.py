"""The reference Llama: its stages, its options, and that it learns."""

import resource

import pytest
import torch
from plain_loop import plain_losses

from piper.capture import capture
from piper.models.llama import Llama, LlamaConfig, cross_entropy


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_are_spread_over_stages(stages: int) -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig(layers=3), stages)

    assert [model.stage(layer) for layer in range(3)] == [[0, 0, 0], [0, 0, 1]][stages - 1]


def test_a_model_larger_than_memory_is_captured_on_meta() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig(vocab=100_000, dim=16_384, layers=2, heads=128), stages=2)
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    captured = capture(model, cross_entropy, (tokens, tokens))

    assert [region.id for region in captured.model.regions] == ["PP0", "PP1"]
    size = sum(sum(s.nbytes for s in bucket.specs) for bucket in captured.model.buckets.values())
    assert size > 30e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="layers=4 cannot be cut into stages=5"):
        Llama(LlamaConfig(layers=4), stages=5)


def test_a_tied_head_is_the_embedding() -> None:
    model = Llama(LlamaConfig(tied=True))

    assert model.head.weight is model.embedding.weight


def test_it_learns_a_sequence_by_heart() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab=16, layers=1, kv_heads=2))
    tokens = torch.randint(16, (1, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [(tokens[:, :-1], tokens[:, 1:])] * 60

    losses = plain_losses(optimizer, batches, lambda x, y: cross_entropy(model(x), y))

    assert losses[-1] < 0.1 < 2 < losses[0]


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model = Llama(LlamaConfig())
    tokens = torch.randint(128, (1, 8))

    whole, part = model(tokens), model(tokens[:, :5])

    torch.testing.assert_close(whole[:, :5], part)
