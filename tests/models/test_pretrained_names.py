"""Folders whose tensors are not those of the model, as transformers reads and writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Architecture
from plain_loop import plain_losses
from pool import run_on
from pretrained import SGD, tune_experts_on

import piper
from piper.errors import InputError
from piper.models.hugging_face_build import build_on_meta
from piper.models.weight_conversion import Conversion, Group, converted
from piper.pretrained import as_transformers, layout_in, stored
from piper.runtime.checkpoint import weights as reading
from piper.runtime.checkpoint.format.files import read_part
from piper.runtime.checkpoint.model_names import model_tensors
from piper.runtime.checkpoint.weights import Weights, weights_at
from piper.runtime.state.element_runs import ElementRun

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
MIXED = ("Mixtral", "Qwen3Moe", "Olmoe", "Deepseek", "GptOss")
MIXTURES = [one for one in ARCHITECTURES if one.name.startswith(MIXED)]
QWEN = next(one for one in ARCHITECTURES if one.name == "Qwen3MoeForCausalLM")


def written(one: Architecture, folder: Path, **options: Any) -> Any:
    """A model with random weights, saved by transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, one.config)(**one.sizes)
    model = getattr(transformers, one.name)(config)
    for parameter in model.parameters():  # zeros and ones hide where they are from
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, **options)
    return model


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {k: v for file in files for k, v in safetensors.load_file(file).items()}


def read_by_piper(model: Any, folder: Path) -> tuple[Conversion, Weights]:
    conversion = Conversion(build_on_meta(type(model), model.config))
    layout = layout_in(folder, conversion)
    found = weights_at(folder, model_tensors(conversion.model), None, lambda _: layout)
    return conversion, found


@pytest.mark.parametrize("one", ARCHITECTURES, ids=lambda one: one.name)
def test_folders_are_read_and_written_as_transformers_does(
    one: Architecture, tmp_path: Path
) -> None:
    model = written(one, tmp_path)

    conversion, found = read_by_piper(model, tmp_path)
    files = as_transformers(conversion, model_tensors(conversion.model))

    for name, wanted in model.state_dict().items():
        assert torch.equal(found.whole(name, wanted), wanted), name
    assert files is not None
    assert files.shapes == {name: tuple(t.shape) for name, t in tensors_in(tmp_path).items()}


@pytest.mark.soak
@pytest.mark.parametrize("one", MIXTURES, ids=lambda one: one.name)
def test_a_mixture_of_the_hub_is_tuned_in_processes(one: Architecture, tmp_path: Path) -> None:
    model, data = written(one, tmp_path / "a").train(), [one.batch(seed) for seed in range(2)]
    model.set_experts_implementation("eager")

    results = run_on(2, tune_experts_on, str(tmp_path / "a"), str(tmp_path / "b"), data)

    losses = plain_losses(SGD(model.parameters()), data, lambda **batch: model(**batch).loss)
    for found in results:
        assert found == pytest.approx(losses, rel=1e-5)
    before, after = tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b")
    assert {k: v.shape for k, v in before.items()} == {k: v.shape for k, v in after.items()}
    again = type(model).from_pretrained(tmp_path / "b")
    for name, wanted in model.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), wanted, rtol=1e-4, atol=1e-6)


def test_only_the_experts_of_a_device_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = written(QWEN, tmp_path)
    _, found = read_by_piper(model, tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    wanted, read = model.get_parameter(name).detach(), list[int]()

    def counted(path: Path, start: int, length: int) -> bytearray:
        read.append(length)
        return read_part(path, start, length)

    monkeypatch.setattr(reading, "read_part", counted)

    half = found.elements(name, [ElementRun(wanted.numel() // 2, wanted.numel() // 2, 0)])

    assert torch.equal(half, wanted[2:].flatten())
    assert sum(read) == half.nbytes


def test_what_is_missing_is_told_before_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(QWEN, tmp_path)
    some = {k: v for k, v in tensors_in(tmp_path).items() if "layers.1.mlp.experts" not in k}
    safetensors.save_file({**some, "other": torch.ones(2)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(piper.pretrained, "tag_unannotated", None)  # the capture would fail

    with pytest.raises(InputError) as told:
        piper.from_pretrained(tmp_path, example=QWEN.batch(0))

    assert "layers.1.mlp.experts.gate_up_proj is missing" in str(told.value)
    assert "strict=False" not in str(told.value)
    assert "piper.Trainer(model, None" in str(told.value)


def test_a_missing_expert_is_told(tmp_path: Path) -> None:
    model = written(QWEN, tmp_path)
    some = {k: v for k, v in tensors_in(tmp_path).items() if "layers.1.mlp.experts.3." not in k}
    safetensors.save_file(some, tmp_path / "model.safetensors")

    with pytest.raises(InputError, match=r"gate_up_proj as \[3, .*the model as \[4, "):
        read_by_piper(model, tmp_path)


def test_older_names_are_read(tmp_path: Path) -> None:
    """The hub's gpt2 has no prefix, and its bert has other names of norms."""
    gpt2 = next(one for one in ARCHITECTURES if one.name == "GPT2LMHeadModel")
    bert = next(one for one in ARCHITECTURES if one.name == "BertForMaskedLM")
    for one, folder in ((gpt2, tmp_path / "gpt2"), (bert, tmp_path / "bert")):
        model = written(one, folder)
        kept = {older(name): tensor for name, tensor in tensors_in(folder).items()}
        assert kept.keys() != tensors_in(folder).keys()
        safetensors.save_file(kept, folder / "model.safetensors")

        _, found = read_by_piper(model, folder)

        for name, wanted in model.state_dict().items():
            assert torch.equal(found.whole(name, torch.zeros_like(wanted)), wanted), name


def older(name: str) -> str:
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma").removeprefix("transformer.")
    return name.replace("LayerNorm.bias", "LayerNorm.beta")


def test_what_transformers_computes_otherwise_is_refused() -> None:
    """Rather than read as something else."""

    class Interleave:
        dim = 1

    class Converter:
        source_patterns, target_patterns = ("a",), ("b",)
        operations = (Interleave(),)

    group = Group(Converter(), {"a": ["a"]})
    with pytest.raises(InputError, match="by Interleave, which Piper does not do"):
        converted("b", group, {"a": (2, 4)}, {"b": torch.empty(2, 4)})


def test_fused_tensors_are_cut(tmp_path: Path) -> None:
    """As transformers cuts them, along any dimension."""
    core = pytest.importorskip("transformers.core_model_loading")
    for dim in (0, 1):
        fused = torch.arange(24.0).view(4, 6)
        make = core.WeightConverter("qkv", ["q", "k"], [core.Chunk(dim=dim)])
        wanted = core.Chunk(dim=dim).convert({"qkv": [fused]}, ["qkv"], ["q", "k"])
        safetensors.save_file({"x.qkv": fused}, tmp_path / f"{dim}.safetensors")
        known = {f"x.{name}": one for name, one in wanted.items()}

        boxes = converted("x.q", Group(make, {"qkv": ["x.qkv"]}), {"x.qkv": (4, 6)}, known)

        layout = {name: stored(one) for name, one in boxes.items()}
        places = dict(reading.entries(tmp_path / f"{dim}.safetensors"))
        for name, one in known.items():
            assert torch.equal(Weights(places, layout).whole(name, one * 0), one)
