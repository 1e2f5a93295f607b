"""Models of Hugging Face, unedited, in regions by module path."""

import pytest
import torch
from capture.grouped import grouped
from capture.interpreter import assert_parity
from torch import Tensor
from torch.nn import functional

from piper.capture import annotate, capture, tag

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


@pytest.mark.parametrize("attention", [pytest.param("eager", marks=pytest.mark.soak), "sdpa"])
def test_llama(attention: str) -> None:
    """Exact, but for sdpa: Hugging Face's own code repeats keys when it is traced, and lets the
    kernel share them when it is not. Sums are then in another order; on some CPUs, so are bits."""
    config = transformers.LlamaConfig(**SIZES, attn_implementation=attention)
    model = transformers.LlamaForCausalLM(config)
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
    assert_parity(captured, model, next_token, batch, exact=attention == "eager")


@pytest.mark.soak
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


def sorted_experts(self, x: Tensor, expert: Tensor, score: Tensor) -> Tensor:
    """What Piper asks of experts: rows sorted by expert and a count for each, as one region."""
    chosen, expert = expert.shape[-1], expert.flatten()
    order = expert.argsort(stable=True)
    counts = functional.one_hot(expert, self.num_experts).sum(0)
    rows = x[order // chosen]
    with annotate("EP"):
        rows = self._apply_gate(grouped(rows, self.gate_up_proj.transpose(1, 2), counts))
        rows = grouped(rows, self.down_proj.transpose(1, 2), counts)
    rows = torch.zeros_like(rows).index_copy(0, order, rows)
    return (rows.view(-1, chosen, x.shape[-1]) * score.unsqueeze(-1)).sum(1)


@pytest.mark.soak
def test_qwen3_with_experts() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    moe.ALL_EXPERTS_FUNCTIONS.register("sorted", sorted_experts)
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        experts_implementation="sorted",
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    tag(
        model,
        "PP",
        [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]],
    )
    batch = tokens(), tokens()

    captured = capture(model, next_token, batch)

    ids = [region.id for region in captured.model.regions]
    assert ids == ["PP0", "PP0.EP0", "PP0#1", "PP1", "PP1.EP1", "PP1#1"]
    assert_parity(captured, model, next_token, batch, exact=False)
