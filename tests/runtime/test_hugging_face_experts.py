"""Mixtral and Qwen3-MoE of Hugging Face, unedited: experts on two devices, as in one process."""

from functools import partial

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import tag
from piper.job.programs.rehearsal import rehearse
from piper.models.hugging_face import adapt_experts
from piper.strategies import one_f_one_b

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None,
    "num_experts_per_tok": 2,
}  # fmt: skip
STAGES = [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]]
SGD = partial(torch.optim.SGD, lr=0.5)


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
        return transformers.MixtralForCausalLM(config).double()
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=12, num_experts=4
    )
    return transformers.Qwen3MoeForCausalLM(config).double()


def next_token(output: object, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = partial(torch.randint, 0, 32, (8, 5), generator=torch.Generator().manual_seed(2))
    return [(draw(), draw()) for _ in range(3)]


@pytest.mark.soak  # one mixture of each kind is in tests/models
@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_unedited_models_train_as_their_authors_wrote_them(name: str) -> None:
    """The reference is the model's own code, with its own loop over experts."""
    own = build(name)
    own.set_experts_implementation("eager")  # the others know no float64
    optimizer = SGD(own.parameters())
    losses = plain_losses(
        optimizer, batches(), lambda tokens, labels: next_token(own(tokens), labels)
    )
    model = adapt_experts(build(name))
    tag(model, "PP", STAGES)
    strategy = one_f_one_b(pp=2, microbatches=2, dp=2, ep=2, zero=2)

    found = rehearse(model, next_token, strategy, batches(), optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-9)
    for parameter, tensor in own.named_parameters():
        torch.testing.assert_close(
            found.parameters[parameter], tensor.detach(), rtol=1e-8, atol=1e-10
        )
