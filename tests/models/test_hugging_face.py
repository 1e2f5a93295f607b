"""Hugging Face's mixtures of experts with Piper's experts, against their own."""

import copy
import sys
from functools import partial

import pytest
import torch
from capture.interpreter import assert_parity, eager
from draws import every
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.capture import capture, tag
from piper.errors import CaptureError, InputError
from piper.job.programs.rehearsal import rehearse
from piper.models.hugging_face import adapt_experts

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
STAGE = ["model.embed_tokens", "model.layers.0", "model.norm", "lm_head"]


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen3() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=24, num_experts=4, norm_topk_prob=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def next_token(output, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten())


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(64, (2, 8)), torch.randint(64, (2, 8))


@pytest.mark.parametrize("make", every(2, [qwen3, mixtral]))
def test_adapted_experts_do_what_their_own_do(make) -> None:
    torch.manual_seed(0)
    model, batch = make(), tokens()
    model.set_experts_implementation("eager")
    output, (loss, grads) = model(batch[0]).logits, eager(model, next_token, batch)
    tag(model, "PP", [STAGE])

    adapted = adapt_experts(model)

    assert adapted is model
    torch.testing.assert_close(model(batch[0]).logits, output)
    torch.testing.assert_close(eager(model, next_token, batch), (loss, grads))
    check_regions(model, batch)


def check_regions(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    captured = capture(model, next_token, batch)

    assert [region.id for region in captured.model.regions] == ["PP0", "PP0.EP0", "PP0#1"]
    experts = captured.model.by_id["PP0.EP0"]
    specs = [captured.model.values[name].specs[0] for name in experts.inputs]
    assert [spec.shape for spec in specs] == [(2 * 8 * 2, 16), (4,)]
    (bucket,) = (captured.model.buckets[name] for name in experts.buckets)
    assert [spec.shape for spec in bucket.specs] == [(4, 48, 16), (4, 16, 24)]
    assert_parity(captured, model, next_token, batch, exact=False)


def padded(ids: Tensor) -> dict[str, Tensor]:
    """Rows of different lengths: their labels count differently."""
    counts = torch.arange(8) < torch.tensor([[3], [8], [5], [6]])
    return {"input_ids": ids, "attention_mask": counts.long(), "labels": ids.where(counts, -100)}


def test_an_unedited_model_trains_on_its_own_batches_and_loss() -> None:
    sizes = {**SIZES, "num_hidden_layers": 2, "attention_dropout": 0.0}
    sizes.pop("num_experts_per_tok")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()
    ids = [torch.randint(64, (4, 8)) for _ in range(2)]
    batches = [transformers.BatchEncoding(padded(one)) for one in ids]
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    wanted = plain_losses(optimizer, batches, lambda **batch: reference(**batch).loss)

    strategy = piper.strategies.one_f_one_b(pp=2, microbatches=2)
    sgd = partial(torch.optim.SGD, lr=0.1)
    found = piper.rehearse(model, None, strategy, batches, optimizer=sgd)

    assert found.losses == pytest.approx(wanted, rel=1e-6)  # the loss itself is in float32
    for name, parameter in reference.named_parameters():
        if name in found.parameters:
            close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-9)
            close(found.parameters[name], parameter.detach())


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        adapt_experts(nn.Linear(2, 2))

    assert str(refused.value) == (
        "adapt_experts: Linear has no experts whose implementation transformers can replace\n"
        "  fix: give a model built by transformers, such as Mixtral or Qwen3-MoE, or annotate "
        'the experts of your own model: with annotate("EP")'
    )


def test_experts_with_a_norm_are_named() -> None:
    config = transformers.GptOssConfig(**{**SIZES, "head_dim": 8}, num_local_experts=4)
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(config)
    model.model.layers[0].mlp.experts.has_post_expert_norm = True

    with pytest.raises(InputError) as refused:
        adapt_experts(model)

    assert str(refused.value) == (
        "adapt_experts: model.layers.0.mlp.experts (GptOssExperts) has a norm after its experts\n"
        '  fix: write `with piper.annotate("EP"):` around the products with the weights of '
        "model.layers.0.mlp.experts in its forward, or train it without `ep`"
    )


def test_experts_that_were_not_adapted_are_named() -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, use_cache=False)
    model, tokens = transformers.MixtralForCausalLM(config), torch.zeros(2, 4, dtype=torch.long)

    with pytest.raises(CaptureError) as refused:
        rehearse(model, None, None, [{"input_ids": tokens, "labels": tokens}])

    assert (
        "the experts model.layers.0.mlp.experts are those of transformers, which cannot be "
        "captured\n  fix: write piper.models.hugging_face.adapt_experts(model) before the Trainer"
    ) in str(refused.value)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)

    with pytest.raises(InputError) as refused:
        adapt_experts(nn.Linear(2, 2))

    assert str(refused.value) == (
        "adapt_experts: it needs transformers 5 or later\n  fix: pip install 'transformers>=5'"
    )
