"""Pretrain a Llama or a mixture of experts from a TOML file: data, logs, checkpoints, evaluation.

    piper run examples/pretrain.py -n 4 --config examples/pretrain_llama.toml
    piper run examples/pretrain.py -n 4 --config examples/pretrain_mixture.toml
    piper run examples/pretrain.py -n 2 --config examples/pretrain_llama.toml strategy.dp=1

Run it again to resume. What follows the file replaces entries of it. The text is the source of
Python's standard library, byte by byte, or a file of your own (`data.file=text.txt`).
"""

import argparse
import ast
import json
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from train_text import batches, library_text

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig, moe_loss

KINDS = {
    "llama": (Llama, LlamaConfig, cross_entropy),
    "mixture": (Qwen3Moe, Qwen3MoeConfig, moe_loss),
}


def config() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("entries", nargs="*", help="such as train.steps=10")
    chosen = parser.parse_args()
    found = tomllib.loads(chosen.config.read_text())
    for entry in chosen.entries:
        path, equals, text = entry.partition("=")
        section, _, name = path.partition(".")
        known = found.get(section, {})
        if not equals or not known or (section in ("data", "train") and name not in known):
            there = ", ".join(f"{key}.{one}" for key, every in found.items() for one in every)
            parser.error(f"{entry}: write one of these, with =value: {there}")
        known[name] = value(text, known.get(name))
    return found


def value(text: str, before: Any) -> Any:
    """A number, a list, true, None, ...; else text. What is text in the file stays text."""
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            found = read(text)
            is_text = isinstance(before, str) and not isinstance(found, str | list | None)
            return text if is_text else found
    return text


def build(sizes: dict[str, Any], stages: int) -> tuple[torch.nn.Module, Any]:
    kind, make, loss_fn = KINDS[sizes.pop("kind")]
    torch.manual_seed(0)  # every process builds the same model
    return kind(make(**sizes), stages), loss_fn


def rows_of(data: dict[str, Any], seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    file = data.get("file")
    text = library_text() if not file else torch.from_file(
        file, size=Path(file).stat().st_size, dtype=torch.uint8
    )  # fmt: skip
    return batches(text, data["rows"], data["length"], seed)


def main() -> None:
    given = config()
    train, data, strategy = given["train"], given["data"], given["strategy"]
    builder = piper.strategies.BUILDERS[strategy.pop("schedule")]
    model, loss_fn = build(given["model"], strategy["pp"])
    trainer = piper.Trainer(
        model, loss_fn, builder(**strategy), example=next(rows_of(data, 0)),
        optimizer=partial(torch.optim.AdamW, lr=train["lr"], weight_decay=0.1),
        lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=train["steps"]),
        no_decay=["norm"], max_norm=1.0, ema=train.get("ema"), log=train["log"],
    )  # fmt: skip
    folder = Path(train["checkpoint"])
    done = trainer.resume(folder, missing_ok=True)
    mine = rows_of(data, 1 + trainer.replica)
    for step, batch in enumerate(islice(mine, done, train["steps"]), done + 1):
        trainer.step(batch)
        if step % train["save_every"] == 0 or step == train["steps"]:
            trainer.save(folder, keep=2)
    with trainer.averaged():
        held_out = trainer.evaluate(islice(rows_of(data, 1000 + trainer.replica), 4))
    trainer.close()
    if trainer.rank == 0:
        print(f"held out: {held_out}  perplexity: {held_out.perplexity:.2f}")


if __name__ == "__main__":
    main()
