"""Train an unedited Hugging Face model as a pipeline: Piper finds its layers.

    piper run examples/hugging_face.py -n 2

This needs transformers (pip install ".[hf]"). Weights are random; nothing is downloaded.
"""

from functools import partial

import torch
import transformers

import piper
from piper.models.llama import cross_entropy

LAYERS, STAGES, MICROBATCHES = 4, 2, 4


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def loss_fn(output: transformers.utils.ModelOutput, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits, labels)


def main() -> None:
    tokens = torch.randint(0, 128, (MICROBATCHES, 16), generator=torch.Generator().manual_seed(1))
    trainer = piper.Trainer(
        build(),
        loss_fn,
        piper.strategies.one_f_one_b(pp=STAGES, microbatches=MICROBATCHES),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        example=(tokens, tokens),
    )
    for _ in range(5):
        metrics = trainer.step(tokens, tokens)
        if trainer.rank == 0:
            print(metrics, flush=True)


if __name__ == "__main__":
    main()
