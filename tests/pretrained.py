"""A Hugging Face model in a folder, trained from there under a strategy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

import piper

SGD = partial(torch.optim.SGD, lr=0.1)
SIZES = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def config(**given: Any) -> Any:
    import transformers

    return transformers.LlamaConfig(**{**SIZES, **given})


def write_model(folder: Path, tied: bool = True) -> Any:
    """A model with random weights, which is also returned."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config(tie_word_embeddings=tied))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def batches(rows: int = 4) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 32, (rows, 6), generator=draw) for _ in range(2)]
    return [{"input_ids": one, "labels": one} for one in ids]


def tune_on(rank: int, source: str, target: str) -> list[float]:
    """Each process reads its part, trains, and writes its part."""
    strategy = piper.strategies.one_f_one_b(pp=2, dp=2, microbatches=1, zero=3)
    data = batches()
    half = {name: one[:2] for name, one in data[0].items()}
    trainer = piper.from_pretrained(source, strategy, example=half, optimizer=SGD)
    part = slice(2 * trainer.replica, 2 * trainer.replica + 2)
    losses = [trainer.step({n: t[part] for n, t in one.items()}).loss for one in data]
    trainer.save_pretrained(target)
    trainer.close()
    return losses


def tune_experts_on(
    rank: int, source: str, target: str, data: list[dict[str, torch.Tensor]]
) -> list[float]:
    """Each of two processes reads, trains and writes half of the experts."""
    strategy = piper.strategies.one_f_one_b(pp=1, dp=2, ep=2, microbatches=1, zero=2)
    half = {name: one[: len(one) // 2] for name, one in data[0].items()}
    trainer = piper.from_pretrained(source, strategy, example=half, optimizer=SGD)
    size = len(half["labels"])
    part = slice(size * trainer.replica, size * trainer.replica + size)
    losses = [trainer.step({n: t[part] for n, t in one.items()}).loss for one in data]
    trainer.save_pretrained(target)
    trainer.close()
    return losses
