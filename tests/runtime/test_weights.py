"""Weights in safetensors files, with the names of the model, under any strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import alone, export_half, load_there, weights
from pool import run_on
from replicas import Net, data
from torch import nn

from piper import Place, Replicate, Split, Strategy, Trainer, where
from piper.errors import InputError
from piper.strategies import BUILDERS

safetensors = pytest.importorskip("safetensors.torch")

ONE = Strategy([Place(where(), [0]), Split("MB", 4)])
TWO = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)])
SHARDS = BUILDERS["1f1b"](pp=1, microbatches=2, dp=2, zero=3)
EXPERTS = BUILDERS["1f1b"](pp=1, microbatches=2, dp=2, ep=2, zero=1)
STAGES = BUILDERS["1f1b"](pp=2, microbatches=4)
DIVIDED = BUILDERS["1f1b"](pp=1, microbatches=4, tp=2)
CASES = {
    "shards to copies": ("uneven", SHARDS, TWO),
    "tied, stages to shards": ("llama", STAGES, SHARDS),
    "experts apart to one": ("moe spread", EXPERTS, STAGES),
    "divided to shards": ("wide", DIVIDED, SHARDS),
    "copies to divided": ("wide", TWO, DIVIDED),
}


SLOW = {"tied, stages to shards", "experts apart to one", "copies to divided"}
DRAWN = [
    pytest.param(*case, id=name, marks=[pytest.mark.soak] if name in SLOW else [])
    for name, case in CASES.items()
]


@pytest.mark.parametrize(("model", "before", "after"), DRAWN)
def test_weights_move_between_strategies(
    model: str, before: Strategy, after: Strategy, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"

    wanted, _ = run_on(2, export_half, model, 2, before.to_json(), str(folder))
    found, _ = run_on(2, load_there, model, 2, after.to_json(), str(folder))

    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    written = {k: v for path in files for k, v in safetensors.load_file(path).items()}
    assert len(files) > 1
    assert all(torch.equal(written[name], wanted[name]) for name in written)
    tied = wanted.keys() - written.keys()
    assert all(any(torch.equal(wanted[n], one) for one in written.values()) for n in tied)


def test_a_model_of_hugging_face_is_loaded_and_exported(tmp_path: Path) -> None:
    """As save_pretrained writes it, in several files, and as from_pretrained reads it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1)
    pretrained = transformers.LlamaForCausalLM(config)
    pretrained.save_pretrained(tmp_path / "hub", max_shard_size="4KB")
    torch.manual_seed(2)
    model, tokens = transformers.LlamaForCausalLM(config), torch.arange(12).view(2, 6)

    def loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())

    trainer = Trainer(model, loss, example=(tokens, tokens), device="cpu")
    trainer.load(tmp_path / "hub")
    first = trainer.step(tokens, tokens).loss
    trainer.export(tmp_path / "mine", max_file_gib=4e-6)
    config.save_pretrained(tmp_path / "mine")
    wanted = weights(trainer)
    trainer.close()

    assert first == pytest.approx(loss(pretrained(tokens), tokens).item(), rel=1e-5)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "mine")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in wanted.items())


def test_a_checkpoint_gives_its_weights_alone(tmp_path: Path) -> None:
    first = alone()
    first.step(*data()[0])
    first.save(tmp_path / "run")
    wanted = weights(first)
    second = alone(optimizer=torch.optim.SGD)  # another one than was saved
    second.load(tmp_path / "run")

    found = weights(second)
    assert second.steps == 0
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    first.close()
    second.close()


@pytest.fixture(scope="module")
def trainer() -> Any:
    made = alone()
    yield made
    made.close()


def saved(tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    """The weights of a model, with some in place of others."""
    found = {name.replace(".", "_"): t for name, t in Net().state_dict().items()}
    found = {name: t for name, t in {**found, **changes}.items() if t is not None}
    names = {name.replace(".", "_"): name for name in Net().state_dict()}
    path = tmp_path / "some.safetensors"
    safetensors.save_file({names.get(n, n): t.contiguous() for n, t in found.items()}, path)
    return path


def test_names_that_do_not_fit_are_refused(tmp_path: Path, trainer: Trainer) -> None:
    before = weights(trainer)
    path = saved(tmp_path, first_bias=None, other=torch.ones(2))

    with pytest.raises(InputError, match="first.bias is missing; other is unknown"):
        trainer.load(path)
    assert all(torch.equal(before[n], t) for n, t in weights(trainer).items())
    trainer.load(path, strict=False)

    assert torch.equal(weights(trainer)["first.bias"], before["first.bias"])


def test_names_may_be_others(tmp_path: Path, trainer: Trainer) -> None:
    path, wanted = tmp_path / "x.safetensors", {n: t + 1 for n, t in Net().state_dict().items()}
    safetensors.save_file({f"model.{name}": t.float() for name, t in wanted.items()}, path)

    trainer.load(path, rename=lambda name: f"model.{name}")

    found = weights(trainer)
    assert all(torch.equal(found[n], t.float().double()) for n, t in wanted.items())


def test_types_that_files_do_not_have_are_named(tmp_path: Path) -> None:
    dtype = torch.complex128
    net, x = nn.Linear(3, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (output - labels).abs().mean()

    with (
        Trainer(net, loss, example=(x, x), device="cpu") as trainer,
        pytest.raises(InputError) as found,
    ):
        trainer.export(tmp_path)

    assert not [*tmp_path.iterdir()]
    assert str(found.value).startswith(
        "export: weight is of type torch.complex128, and safetensors files have no such type\n"
        "  fix: leave it out: only=lambda name: name != 'weight'; or call weights = "
    )


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, trainer: Trainer) -> None:
    with pytest.raises(InputError, match=r"has first.bias as \[9\], the model as \[6\]"):
        trainer.load(saved(tmp_path, first_bias=torch.ones(9)), strict=False)


@pytest.mark.parametrize("name", ["model.bin", "x.pt", "missing.safetensors", "empty"])
def test_other_files_are_refused(name: str, tmp_path: Path, trainer: Trainer) -> None:
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    elif name != "missing.safetensors":
        torch.save(Net().state_dict(), path)

    with pytest.raises(InputError, match="give a .safetensors file"):
        trainer.load(path)


@pytest.mark.parametrize("cut", [0, 3, 8, 40, -1])
def test_a_damaged_file_is_refused(cut: int, tmp_path: Path, trainer: Trainer) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])

    with pytest.raises(InputError, match="some.safetensors"):
        trainer.load(path)


def test_weights_are_loaded_before_the_first_step(tmp_path: Path) -> None:
    trainer = alone()
    trainer.export(tmp_path)
    trainer.step(*data()[0])
    with pytest.raises(InputError, match="load before the first step"):
        trainer.load(tmp_path)
    trainer.close()
