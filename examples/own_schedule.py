"""Your own schedule, written as PyTorch's schedule text: one row per device.

    piper show examples/own_schedule.py
    piper run examples/own_schedule.py -n 2

Both devices split every backward into input gradients (I) and weight gradients (W). No other device
waits for weight gradients, so they run last.
"""

from functools import partial

import torch

import piper
from piper.models.llama import Llama, LlamaConfig, cross_entropy

MICROBATCHES = 4


def rows() -> str:
    """Device 0 runs all forwards first; device 1 follows each forward with its input gradients."""
    parts = range(MICROBATCHES)
    forwards = [f"0F{part}" for part in parts]
    inputs = [f"0I{part}" for part in parts]
    alternating = [action for part in parts for action in (f"1F{part}", f"1I{part}")]
    weights = [[f"{stage}W{part}" for part in parts] for stage in (0, 1)]
    first, second = forwards + inputs + weights[0], alternating + weights[1]
    return "\n".join([",".join(first), ",".join(second)])


def main() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(layers=2, tied=True), stages=2)
    tokens = torch.randint(0, 128, (MICROBATCHES, 16))
    trainer = piper.Trainer(
        model,
        cross_entropy,
        piper.strategies.from_csv(rows()),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        example=(tokens, tokens),
    )
    for _ in range(5):
        metrics = trainer.step(tokens, tokens)
        if trainer.rank == 0:
            print(metrics, flush=True)


if __name__ == "__main__":
    main()
