"""Fine-tune a Hugging Face model with LoRA: the weights are frozen, small adapters are trained.

    piper run examples/lora.py -n 2
    piper run examples/lora.py -n 2 --model FOLDER --output adapters
    piper run examples/lora.py -n 2 --model FOLDER --peft           # adapters of peft
    piper run examples/lora.py -n 2 --model GPT_NEOX --targets query_key_value
    piper run examples/lora.py -n 2 --checkpoint runs/lora          # run it again to resume

Without --model, it makes a small Llama with random weights. Only adapters have gradients and
optimizer state; with zero=3, the frozen weights are sharded, too. This needs transformers (pip
install ".[hf]"), and peft for --peft. With --peft, every process reads only its part of the
weights; the adapters of this file are for models that peft does not know.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import transformers
from fine_tune import EVERY, dicts, small
from torch import Tensor, nn

import piper

TARGETS = ("q_proj", "v_proj")


class Lora(nn.Module):
    """A frozen layer, plus the product of two small matrices. The second one begins with zeros."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        kind = layer.weight.dtype
        self.layer, self.scale = layer, alpha / rank
        self.lora_down = nn.Linear(layer.in_features, rank, bias=False, dtype=kind)
        self.lora_up = nn.Linear(rank, layer.out_features, bias=False, dtype=kind)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scale * self.lora_up(self.lora_down(x))


def add_lora(
    model: nn.Module, names: Sequence[str] = TARGETS, rank: int = 8, alpha: float = 16
) -> nn.Module:
    """Freeze the model, and put adapters around its layers of these names."""
    model.requires_grad_(False)
    layers = {path: one for path, one in model.named_modules() if isinstance(one, nn.Linear)}
    known = {path.rpartition(".")[2] for path in layers}
    if missing := set(names) - known:
        raise SystemExit(
            f"--targets: no layer is named {', '.join(sorted(missing))}: choose from "
            f"{', '.join(sorted(known))}"
        )
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        if name in names:
            setattr(model.get_submodule(parent), name, Lora(layer, rank, alpha))
    return model


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder that save_pretrained wrote")
    parser.add_argument("--peft", action="store_true", help="adapters of peft")
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="names of layers to adapt")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--dp", type=int, default=2, help="replicas: pp x dp is -n of piper run")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--log", default="print", help="print, tensorboard, wandb, or a .csv file")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and resume from")
    parser.add_argument("--output", type=Path, help="folder for the adapters at the end")
    return parser.parse_args()


def build(folder: Path | None) -> nn.Module:
    causal = transformers.AutoModelForCausalLM
    model = causal.from_pretrained(folder) if folder else causal.from_config(small())
    model.config.use_cache = False  # a cache is for generation
    return model.train()


def make_trainer(chosen: argparse.Namespace) -> piper.Trainer:
    strategy = piper.strategies.one_f_one_b(pp=chosen.pp, dp=chosen.dp, microbatches=2, zero=3)
    given = {
        "example": next(dicts(0)), "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "log": chosen.log,
    }  # fmt: skip
    if chosen.peft:
        import peft

        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(chosen.targets))
        return piper.from_pretrained(chosen.model or small(), strategy, adapter=config, **given)
    torch.manual_seed(0)  # every process makes the same adapters
    model = add_lora(build(chosen.model), chosen.targets)
    return piper.Trainer(model, None, strategy, **given)


def save_adapters(trainer: piper.Trainer, folder: Path) -> None:
    if hasattr(trainer, "save_pretrained"):
        trainer.save_pretrained(folder)  # for peft
    else:
        trainer.export(folder, only=lambda name: "lora_" in name, file="adapters")


def main() -> None:
    chosen = options()
    trainer = make_trainer(chosen)
    folder = chosen.checkpoint
    done = trainer.resume(folder, missing_ok=True) if folder else 0
    data = dicts(seed=1 + trainer.replica)
    for step, batch in enumerate(islice(data, done, chosen.steps), done + 1):
        trainer.step(batch)
        if folder and (step % EVERY == 0 or step == chosen.steps):
            trainer.save(folder)
    held_out = trainer.evaluate(islice(dicts(seed=1000 + trainer.replica), 4))
    if chosen.output:
        save_adapters(trainer, chosen.output)
    trainer.close()
    if trainer.rank == 0:
        print(f"held out: {held_out}")


if __name__ == "__main__":
    main()
