"""When gradients are reduced: the three choices of the published work, and one by hand.

piper view examples/reductions.py --choice by-hand --svg by-hand.svg   # its timeline
piper show examples/reductions.py --choice by-hand                     # its orders
piper run examples/reductions.py -n 4 --choice buckets

one        reductions share the stream of the token all-to-alls, and wait for them
separate   they have their own stream
buckets    they have their own stream, in messages of five kilobytes
by-hand    an Order says when: one stage of each device reduces while the other ends its
           backwards, but not before the tokens of the last microbatch are on their way
"""

import argparse
from collections.abc import Iterator
from itertools import islice

import torch

import piper
from piper import Order, where
from piper.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig, moe_loss

PP, EP, MICROBATCHES = 2, 2, 4
CONFIG = Qwen3MoeConfig(
    vocab=64, dim=32, layers=4, heads=4, kv_heads=2, head_dim=8, experts=4, expert_hidden=32
)
LAST = MICROBATCHES - 1
BY_HAND = [  # stages 0 and 3 are on one pair of devices, stages 1 and 2 on the other
    Order([[where(PP=early, MB=LAST, PASS="DISPATCH", OF="B")], [where(PP=late, PASS="REDUCE")]])
    for early, late in [(0, 3), (1, 2)]
]
CHOICES = {
    "one": ({"reduce_stream": "ep"}, []),
    "separate": ({"reduce_stream": "dp"}, []),
    "buckets": ({"reduce_stream": "dp", "bucket_mb": 0.005}, []),
    "by-hand": ({"reduce_stream": "dp"}, BY_HAND),
}


def batches(replica: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(replica)
    while True:
        yield torch.randint(0, CONFIG.vocab, (2 * MICROBATCHES, 8), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--choice", default="by-hand", choices=CHOICES)
    options, orders = CHOICES[parser.parse_args().choice]
    strategy = piper.strategies.dualpipev(pp=PP, dp=EP, ep=EP, microbatches=MICROBATCHES, **options)
    torch.manual_seed(0)
    model, example = Qwen3Moe(CONFIG, 2 * PP), next(batches(0))
    trainer = piper.Trainer(model, moe_loss, [*strategy, *orders], example=(example, example))
    for tokens in islice(batches(trainer.replica), 3):
        metrics = trainer.step(tokens, tokens)
        if trainer.rank == 0:
            print(metrics, flush=True)


if __name__ == "__main__":
    main()
