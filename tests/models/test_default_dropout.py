"""GPT-2, BERT and T5 with the dropout of their default configurations, also inside attention.

Piper's masks are not those of eager PyTorch, but they depend on the sample only. So every strategy
trains as one device does.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from shared_capture import capturing_once

import piper
from piper.job.programs.rehearsal import Rehearsal
from piper.strategies import BUILDERS

transformers = pytest.importorskip("transformers")
SGD = partial(torch.optim.SGD, lr=0.1)
ROWS, LENGTH, VOCAB = 4, 5, 16
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"n_layer": 4, "n_embd": 8, "n_head": 2, "n_positions": 8, "use_cache": False}),
    "bert": ("BertForMaskedLM", "BertConfig",
             {"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2,
              "intermediate_size": 16, "max_position_embeddings": 8}),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"num_layers": 2, "d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 16,
            "use_cache": False, "decoder_start_token_id": 0}),
}  # fmt: skip
STRATEGIES = {
    "1f1b": BUILDERS["1f1b"](pp=2, microbatches=4),
    "zero3": BUILDERS["1f1b"](pp=1, dp=2, zero=3, microbatches=2),
    "dualpipev": BUILDERS["dualpipev"](pp=2, microbatches=4),
}
CASES = [(model, strategy) for strategy in STRATEGIES for model in MODELS]


@cache
def model_of(name: str) -> tuple[torch.nn.Module, Any]:
    kind, config, sizes = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(vocab_size=VOCAB, pad_token_id=0, **sizes)
    model = getattr(transformers, kind)(made).double().train()
    piper.tag_layers(model, **batches_of(1)[0])
    return model, capturing_once()


def batches_of(count: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    tokens = [torch.randint(1, VOCAB, (ROWS, LENGTH), generator=draw) for _ in range(count)]
    return [{"input_ids": one, "labels": one} for one in tokens]


@cache
def trained(name: str, strategy: str | None, seed: int = 0) -> Rehearsal:
    """Two steps. Without a strategy, on one device, with microbatches of the same size."""
    one = piper.Strategy([piper.Place(piper.where(), [0]), piper.Split("MB", 4)])
    given, (model, once) = STRATEGIES.get(strategy or "", one), model_of(name)
    with once:
        return piper.rehearse(
            model, None, given, batches_of(2), optimizer=SGD, reduction="mean", seed=seed
        )


@pytest.mark.soak
@pytest.mark.parametrize(("name", "strategy"), CASES, ids=map(str, CASES))
def test_every_strategy_draws_the_same_masks(name: str, strategy: str) -> None:
    alone, found = trained(name, None), trained(name, strategy)

    assert trained(name, None, seed=1).losses != pytest.approx(alone.losses, rel=1e-4)
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)  # computed in float32
    for parameter, value in alone.parameters.items():
        torch.testing.assert_close(found.parameters[parameter], value, rtol=1e-5, atol=1e-7)
