"""Fine-tune a Hugging Face model under ZeRO-3, with evaluation, logs, checkpoints and resume.

    piper run examples/fine_tune.py -n 2
    piper run examples/fine_tune.py -n 2 --model FOLDER --pp 2 --dp 1
    piper run examples/fine_tune.py -n 2 --checkpoint runs/tuned     # run it again to resume

Without --model, it makes a small Llama with random weights. The text is the source of Python's
standard library, byte by byte. This needs transformers (pip install ".[hf]").
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import transformers
from train_text import batches, library_text

import piper

LENGTH, EVERY = 64, 25  # bytes of a row; steps between checkpoints


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder that save_pretrained wrote")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--dp", type=int, default=2, help="replicas: pp x dp is -n of piper run")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--log", default="print", help="print, tensorboard, wandb, or a .csv file")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and resume from")
    parser.add_argument("--output", type=Path, help="folder for the model at the end")
    return parser.parse_args()


def small() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip


def dicts(seed: int, rows: int = 8) -> Iterator[dict[str, torch.Tensor]]:
    """The model shifts the labels itself, so they are the inputs."""
    for tokens, _ in batches(library_text(), rows, LENGTH, seed):
        yield {"input_ids": tokens, "labels": tokens}


def main() -> None:
    chosen = options()
    strategy = piper.strategies.one_f_one_b(pp=chosen.pp, dp=chosen.dp, microbatches=2, zero=3)
    trainer = piper.from_pretrained(
        chosen.model or small(), strategy, example=next(dicts(0)),
        optimizer=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1), no_decay=["norm"],
        max_norm=1.0, log=chosen.log,
    )  # fmt: skip
    folder = chosen.checkpoint
    done = trainer.resume(folder, missing_ok=True) if folder else 0
    data = dicts(seed=1 + trainer.replica)
    for step, batch in enumerate(islice(data, done, chosen.steps), done + 1):
        trainer.step(batch)
        if folder and (step % EVERY == 0 or step == chosen.steps):
            trainer.save(folder)
    held_out = trainer.evaluate(islice(dicts(seed=1000 + trainer.replica), 4))
    if chosen.output:
        trainer.save_pretrained(chosen.output)
    trainer.close()
    if trainer.rank == 0:
        print(f"held out: {held_out}  perplexity: {held_out.perplexity:.2f}")


if __name__ == "__main__":
    main()
