"""`from_pretrained` reads, trains and writes Hugging Face models, whose weights are on meta."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plain_loop import plain_losses
from pretrained import SGD, batches, config, write_model

import piper
from piper.errors import InputError
from piper.job.programs.programs import described
from piper.models.hugging_face_build import build_on_meta, config_of, first_values, model_class

transformers = pytest.importorskip("transformers")


def test_a_model_is_read_trained_and_written_back(tmp_path: Path) -> None:
    model = write_model(tmp_path / "a").train()
    optimizer = SGD(model.parameters())
    losses = plain_losses(optimizer, batches(), lambda **batch: model(**batch).loss)

    trainer = piper.from_pretrained(tmp_path / "a", example=batches()[0], optimizer=SGD)
    found = [trainer.step(batch).loss for batch in batches()]
    held_out = trainer.evaluate(batches()).loss
    trainer.save_pretrained(tmp_path / "b")
    trainer.close()

    assert found == pytest.approx(losses, rel=1e-6)
    assert all(p.is_meta for p in trainer._job.model.parameters())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    for name, wanted in model.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), wanted, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        loss = sum(again(**batch).loss.item() for batch in batches()) / 2
    assert held_out == pytest.approx(loss, rel=1e-5)
    written = {path.name for path in (tmp_path / "b").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "config.json"} <= written
    assert again.config.to_diff_dict() == model.config.to_diff_dict()


def test_a_configuration_stays_as_it_was_given(tmp_path: Path) -> None:
    given = config()
    before = given.to_dict()

    trainer = piper.from_pretrained(given, example=batches()[0], optimizer=SGD)
    trainer.save_pretrained(tmp_path / "a")
    trainer.close()

    assert given.to_dict() == before
    assert json.loads((tmp_path / "a" / "config.json").read_text())["use_cache"] is given.use_cache


@pytest.mark.soak
def test_averages_are_written_back_too(tmp_path: Path) -> None:
    """And over what was read, in other files, which may be read again."""
    write_model(tmp_path / "a").train().save_pretrained(tmp_path / "b", max_shard_size="1KB")
    given = {"example": batches()[0], "optimizer": SGD, "ema": 0.5}
    trainer = piper.from_pretrained(tmp_path / "b", **given)
    read = trainer.state_dict()
    trainer.save_pretrained(tmp_path / "b")
    trainer.load(tmp_path / "b")
    assert all(torch.equal(read[name], one) for name, one in trainer.state_dict().items())
    for batch in batches():
        trainer.step(batch)
    with trainer.averaged():
        averages = trainer.state_dict()
        trainer.save_pretrained(tmp_path / "b")
    exact = trainer.state_dict()
    trainer.close()

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    for name, found in again.named_parameters():
        torch.testing.assert_close(found, averages[name], rtol=1e-6, atol=1e-8)
    assert any(not torch.equal(averages[name], exact[name]) for name in exact)
    assert not any(torch.equal(averages[name], read[name]) for name in exact)


def test_a_configuration_starts_like_a_model_of_transformers() -> None:
    small = config(hidden_size=64, intermediate_size=128, initializer_range=0.5)
    model = build_on_meta(model_class(small), small)
    fill = first_values(model, seed=3)

    values = {}
    for name, one in model.named_parameters():
        values[name] = torch.empty_like(one, device="cpu")
        fill(name, values[name])

    assert all(one.is_meta for one in model.parameters())
    wanted = transformers.LlamaForCausalLM(small)
    for name, one in wanted.named_parameters():
        torch.testing.assert_close(values[name].std(), one.std(), rtol=0.15, atol=1e-6)
        torch.testing.assert_close(values[name].mean(), one.mean(), rtol=0, atol=0.05)
    again = torch.empty_like(values["lm_head.weight"])
    first_values(model, seed=3)("lm_head.weight", again)
    assert torch.equal(again, values["lm_head.weight"])
    assert not torch.equal(values["model.layers.0.mlp.up_proj.weight"],
                           values["model.layers.1.mlp.up_proj.weight"])  # fmt: skip
    for name, buffer in wanted.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


def test_processes_do_not_compare_the_hashes_that_a_model_holds() -> None:
    """They differ between processes, as the hashes of texts do."""
    small = config()

    found = described("init", first_values(build_on_meta(model_class(small), small)))

    same = ("hashlib", "Problem.__dataclass_fields__")  # names, which are the same in all of them
    assert found and not any("hash" in path for path in found if not path.startswith(same))


def test_experts_can_be_divided_at_once() -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
    mixture = transformers.MixtralConfig(**{**config().to_dict(), **sizes, "model_type": "mixtral"})
    model = piper.pretrained.built(mixture, "MixtralForCausalLM", torch.bfloat16)

    assert model.config._experts_implementation == "piper" and model.training
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "float32"])
def test_a_type_is_one_of_torch(dtype: str) -> None:
    with pytest.raises(InputError, match="is not a type of torch"):
        piper.from_pretrained(config(), example=batches()[0], dtype=dtype)


def test_a_misspelt_class_gets_the_right_one() -> None:
    with pytest.raises(InputError, match="did you mean LlamaForCausalLM?"):
        model_class(config(), "LlamaForCausaLM")


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder with a config.json"):
        config_of(tmp_path)
    with pytest.raises(InputError, match="it is given an int"):
        config_of(3)
    with pytest.raises(InputError, match="transformers has no model LamaForCausalLM"):
        model_class(config(), "LamaForCausalLM")
    with pytest.raises(InputError, match='write model_class="LlamaForCausalLM"'):
        model_class(config(), transformers.LlamaForCausalLM)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="ViTConfig does not say which model to build"):
        model_class(transformers.ViTConfig())
