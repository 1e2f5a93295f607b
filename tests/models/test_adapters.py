"""`from_pretrained` with adapters of peft: read by part, trained alone, written for peft."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from pretrained import batches, write_model
from torch import nn

import piper
from piper.errors import InputError
from piper.models.adapters import pretrained_name, saved_name

transformers = pytest.importorskip("transformers")
ADAM = partial(torch.optim.AdamW, lr=0.05)


def test_names_lead_from_adapters_to_files_and_back() -> None:
    layer = "model.layers.0.self_attn.q_proj"
    names = [f"{layer}.base_layer.weight", f"{layer}.lora_A.default.weight",
             "model.embed_tokens.lora_embedding_B.default", "model.default.norm.weight",
             "score.modules_to_save.default.weight", "score.original_module.weight"]  # fmt: skip

    inside = [f"base_model.model.{name}" for name in names]

    assert [pretrained_name(inside[k]) for k in (0, 3, 4, 5)] == [
        f"{layer}.weight", "model.default.norm.weight", "score.weight", "score.weight",
    ]  # fmt: skip
    assert [saved_name(inside[k]) for k in (1, 2, 3, 4)] == [
        f"base_model.model.{layer}.lora_A.weight", "base_model.model.model.embed_tokens."
        "lora_embedding_B", "base_model.model.model.default.norm.weight",
        "base_model.model.score.weight",
    ]  # fmt: skip


def test_some_tensors_are_exported_under_other_names_and_loaded_again(tmp_path: Path) -> None:
    def trainer(fill: float) -> piper.Trainer:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        nn.init.constant_(net[1].weight, fill)
        x = torch.ones(2, 4)
        return piper.Trainer(net, nn.functional.mse_loss, example=(x, x), device="cpu")

    first, second = trainer(0.5), trainer(0.25)
    last = {"only": lambda name: name.startswith("1."), "rename": lambda name: f"head.{name}"}
    first.export(tmp_path, **last, file="head")
    second.load(tmp_path / "head.safetensors", **last)

    assert torch.equal(second.state_dict()["1.weight"], torch.full((4, 4), 0.5))
    assert not torch.equal(second.state_dict()["0.weight"], first.state_dict()["0.weight"])
    with pytest.raises(InputError, match="no tensor was chosen"):
        first.export(tmp_path / "b", only=lambda name: False)
    with pytest.raises(InputError, match=r"0.bias and 1.bias would both be written as bias"):
        first.export(tmp_path / "c", rename=lambda name: name.rpartition(".")[2], only=is_bias)
    first.close(), second.close()


class Spare(nn.Module):
    """It has parameters that no step uses."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.used, self.spare, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        for one in self.parameters():
            nn.init.constant_(one, fill)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_what_is_loaded_later_leaves_the_rest_as_it_was_loaded(tmp_path: Path) -> None:
    x = torch.ones(2, 4)

    def trainer(fill: float) -> piper.Trainer:
        return piper.Trainer(Spare(fill), nn.functional.mse_loss, example=(x, x), device="cpu")

    trainers = [trainer(fill) for fill in (1.0, 2.0, 3.0)]
    trainers[0].export(tmp_path / "all")
    trainers[1].export(tmp_path / "other", only=lambda name: "other" in name)
    trainers[2].load(tmp_path / "all")
    trainers[2].load(tmp_path / "other", only=lambda name: "other" in name)
    trainers[2].export(tmp_path / "again")
    trainers[0].load(tmp_path / "again")

    for one in (trainers[2], trainers[0]):
        found = {name: tensor.mean().item() for name, tensor in one.state_dict().items()}
        wanted = {"used": 1.0, "spare": 1.0, "other": 2.0}
        assert found == {f"{n}.{part}": v for n, v in wanted.items() for part in ("weight", "bias")}
    for one in trainers:
        one.close()


def is_bias(name: str) -> bool:
    return name.endswith("bias")


def test_without_peft_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    config = transformers.LlamaConfig()

    with pytest.raises(InputError, match=r"adapter: it needs peft\n  fix: pip install peft"):
        piper.from_pretrained(config, example=batches()[0], adapter=object())


def lora(**given: Any) -> Any:
    peft = pytest.importorskip("peft", reason="pip install peft")
    return peft.LoraConfig(
        **{"r": 2, "target_modules": ["q_proj", "v_proj", "embed_tokens"], **given}
    )


def adapted(folder: Path, adapters: Path) -> nn.Module:
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False)
    return peft.PeftModel.from_pretrained(model, adapters, is_trainable=True).train()


WAYS = [  # options, and how many parameters are trained
    ({}, 10), ({"modules_to_save": ["lm_head"]}, 11), ({"lora_alpha": 3}, 10),
    ({"use_rslora": True}, 10), ({"init_lora_weights": "gaussian"}, 10),
    ({"init_lora_weights": False}, 10), ({"lora_bias": True, "target_modules": ["q_proj"]}, 6),
    ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, 5),
]  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("given", "trained"), WAYS)
def test_adapters_are_trained_as_peft_trains_them(
    given: dict[str, Any], trained: int, tied: bool, tmp_path: Path
) -> None:
    config, base, first = lora(**given), tmp_path / "base", tmp_path / "first"
    write_model(base, tied=tied)
    start = piper.from_pretrained(base, example=batches()[0], adapter=config, device="cpu")
    start.save_pretrained(first)
    start.close()
    plain = adapted(base, first)
    optimizer = ADAM([one for one in plain.parameters() if one.requires_grad])
    losses = plain_losses(optimizer, batches(), lambda **batch: plain(**batch).loss)

    trainer = piper.from_pretrained(
        base, example=batches()[0], adapter=config, optimizer=ADAM, device="cpu"
    )
    found = [trainer.step(batch).loss for batch in batches()]
    trainer.save_pretrained(tmp_path / "tuned")
    trainer.close()

    assert found == pytest.approx(losses, rel=1e-5)
    if config.init_lora_weights:  # one of the two matrices begins with zeros
        with torch.no_grad():
            untouched = transformers.AutoModelForCausalLM.from_pretrained(base)
            assert found[0] == pytest.approx(untouched(**batches()[0]).loss.item(), rel=1e-5)
    again = dict(adapted(base, tmp_path / "tuned").named_parameters())
    moved = [name for name, one in plain.named_parameters() if one.requires_grad]
    assert len(moved) == trained
    for name, wanted in plain.named_parameters():
        torch.testing.assert_close(again[name], wanted, rtol=1e-4, atol=1e-6)


def test_trained_adapters_are_read_and_trained_on(tmp_path: Path) -> None:
    config, base = lora(), tmp_path / "base"
    write_model(base, tied=False)
    given = {"example": batches()[0], "optimizer": ADAM, "device": "cpu"}
    first = piper.from_pretrained(base, adapter=config, **given)
    first.step(batches()[0])
    first.save_pretrained(tmp_path / "a")
    wanted = first.evaluate(batches()).loss
    first.close()

    second = piper.from_pretrained(base, adapter=tmp_path / "a", **given)

    assert second.evaluate(batches()).loss == pytest.approx(wanted, rel=1e-6)
    second.close()
    written = {path.name for path in (tmp_path / "a").iterdir()}
    assert written >= {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"}
    described = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base) and described["inference_mode"]
    assert (tmp_path / "a" / "adapter_model.safetensors").stat().st_size < 8_000


@pytest.mark.parametrize("given", [
    {"use_dora": True}, {"init_lora_weights": "pissa"}, {"bias": "all"},
    {"trainable_token_indices": [0, 1]}, {"target_parameters": ["mlp.up_proj.weight"]},
])  # fmt: skip
def test_what_needs_the_weights_of_the_model_is_not_supported(given: dict[str, Any]) -> None:
    config = lora(**given, target_modules=["q_proj"])

    with pytest.raises(InputError, match="adapter: "):
        piper.from_pretrained(
            transformers.LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2,
                                     intermediate_size=8, vocab_size=32),
            example=batches()[0], adapter=config,
        )  # fmt: skip
