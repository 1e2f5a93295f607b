"""A pipeline whose stages have different numbers of devices, for mixed hardware.

    piper show examples/literature/asymmetric_stages.py
    piper check examples/literature/asymmetric_stages.py --numerics
    piper run examples/literature/asymmetric_stages.py -n 4

One fast GPU (device 0) has the first stage, with a third of the layers. The second stage has two
thirds of them, on three slower GPUs, of which device 1 takes half of the rows. Both stages have
four replicas: device 0 runs the first stage for one after the other.
"""

from functools import partial

import torch

import piper
from piper import Order, Place, Replicate, Split, Stage, where
from piper.models.llama import Llama, LlamaConfig, cross_entropy

CONFIG, STEPS, ROWS = LlamaConfig(layers=3), 3, 8

# The stages and the order of 1F1B, as its builder gives them; the devices are ours.
SCHEDULE = piper.strategies.one_f_one_b(pp=2, microbatches=2, stages=[1, 2])
STRATEGY = piper.Strategy([
    *(directive for directive in SCHEDULE if isinstance(directive, Stage)),
    Place(where(PP=0), devices=[0]),
    Place(where(PP=1), devices=[1, 1, 2, 3]),
    Replicate(where(PP=1), devices=[1, 2, 3], zero=2),
    *(directive for directive in SCHEDULE if isinstance(directive, Split | Order)),
])  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    example = torch.arange(ROWS * 8).reshape(ROWS, 8) % CONFIG.vocab
    trainer = piper.Trainer(
        Llama(CONFIG, stages=3),
        cross_entropy,
        STRATEGY,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        example=(example, example),
    )
    data = torch.Generator().manual_seed(trainer.replica)
    for _ in range(STEPS):
        tokens = torch.randint(0, CONFIG.vocab, (ROWS, 8), generator=data)
        metrics = trainer.step(tokens, tokens)
        if trainer.rank == 0:
            print(metrics, flush=True)


if __name__ == "__main__":
    main()
