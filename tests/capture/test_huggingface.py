"""Models of Hugging Face, unedited, in regions by module path."""

import pytest
import torch
from capture.interpreter import assert_parity
from torch import Tensor
from torch.nn import functional

from piper.capture import capture, tag

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def next_token(output, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten())


def tokens() -> Tensor:
    return torch.randint(64, (2, 8))


def test_llama() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    tag(
        model,
        "PP",
        [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]],
    )
    batch = tokens(), tokens()

    captured = capture(model, next_token, batch)

    first, second = captured.model.regions
    assert first.inputs == ("batch:0",)
    assert second.inputs == ("PP0/0", "batch:1"), "masks and rotary tables are not sent"
    assert_parity(captured, model, next_token, batch)


def test_gpt2_with_tied_weights() -> None:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16, attn_pdrop=0.0,
        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    first = ["transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0"]
    tag(model, "PP", [first, ["transformer.h.1", "transformer.ln_f", "lm_head"]])
    batch = tokens(), tokens()

    captured = capture(model, next_token, batch)

    assert captured.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert captured.model.by_id["PP1"].buckets == ("PP1", "PP0+PP1")
    assert_parity(captured, model, next_token, batch)
