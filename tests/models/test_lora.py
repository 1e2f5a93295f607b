"""LoRA: adapters train as in plain PyTorch, and frozen weights stay as they are."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from draws import every
from plain_loop import plain_losses
from torch import nn

import piper
from piper.strategies import one_f_one_b

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "examples"))
ADAM = partial(torch.optim.AdamW, lr=0.01)
STRATEGIES = {
    "zero 3": one_f_one_b(pp=1, dp=2, zero=3, microbatches=2),
    "pipeline": one_f_one_b(pp=2, dp=2, zero=1, microbatches=2),
    "tensor": one_f_one_b(pp=1, tp=2, microbatches=2),
}


def add_peft(model: nn.Module) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, config)


def build(adapters: str, layers: int) -> nn.Module:
    from lora import add_lora

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    model = add_lora(model) if adapters == "own" else add_peft(model).double()
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # one of the two begins with zeros
            nn.init.normal_(parameter, std=0.2)
    return model


def batches() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    found = [torch.randint(0, 64, (8, 6), generator=draw) for _ in range(3)]
    return [{"input_ids": one, "labels": one} for one in found]


def check(adapters: str, strategy: piper.Strategy) -> None:
    layers = sum(isinstance(one, piper.Place) for one in strategy)  # one in each stage
    plain = build(adapters, layers)
    optimizer = ADAM([one for one in plain.parameters() if one.requires_grad])
    losses = plain_losses(optimizer, batches(), lambda **batch: plain(**batch).loss)

    found = piper.rehearse(build(adapters, layers), None, strategy, batches(), optimizer=ADAM)

    assert found.losses == pytest.approx(losses, rel=1e-5)  # transformers computes it in float32
    moved = 0
    for (name, wanted), first in zip(
        plain.named_parameters(), build(adapters, layers).parameters(), strict=True
    ):
        torch.testing.assert_close(found.parameters[name], wanted.detach(), rtol=1e-4, atol=1e-6)
        if not wanted.requires_grad:
            assert torch.equal(found.parameters[name], first)
        moved += wanted.requires_grad and not torch.equal(wanted, first)
    assert moved == 4 * layers  # two matrices of two linear layers in each


@pytest.mark.parametrize("name", every(3, STRATEGIES))
def test_adapters_train_as_in_plain_pytorch(name: str) -> None:
    check("own", STRATEGIES[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", STRATEGIES)
def test_adapters_of_peft_train_as_in_plain_pytorch(name: str) -> None:
    pytest.importorskip("peft")
    check("peft", STRATEGIES[name])


def test_layers_that_a_model_does_not_have_are_named_with_those_it_has() -> None:
    from lora import add_lora

    config = transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.GPTNeoXForCausalLM(config)

    with pytest.raises(SystemExit, match="no layer is named q_proj, v_proj: .* query_key_value"):
        add_lora(model)
    add_lora(model, ["query_key_value"])
    assert sum("lora_" in name for name, one in model.named_parameters() if one.requires_grad) == 2
