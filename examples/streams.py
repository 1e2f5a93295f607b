"""Compare streams of gradient reductions: their own, that of the tokens, or small buckets.

    piper run examples/streams.py -n 4

These are the three choices of the published work. Each is one option of the builder:

    separate    reductions have their own stream, dp
    one         they share the stream of the token all-to-alls, ep
    buckets     they have their own stream, in messages of a quarter of a megabyte

The example measures a step of each. The loss is the same for all.
"""

import statistics

import torch
from train_experts import EP, PP, STREAMS
from train_text import batches, library_text

import piper
from piper.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig, moe_loss

CONFIG = Qwen3MoeConfig(
    vocab=256, dim=64, layers=4, heads=4, kv_heads=2, head_dim=16, experts=8, expert_hidden=128
)
MICROBATCHES, STEPS = 4, 5


def measured(name: str) -> tuple[float, float, bool]:
    """The median step time, the last loss, and whether this process prints."""
    strategy = piper.strategies.dualpipev(
        pp=PP, dp=EP, ep=EP, zero=0, microbatches=MICROBATCHES, **STREAMS[name]
    )
    torch.manual_seed(0)
    example = next(batches(library_text(), rows=MICROBATCHES))
    trainer = piper.Trainer(Qwen3Moe(CONFIG, 2 * PP), moe_loss, strategy, example=example)
    data = batches(library_text(), rows=MICROBATCHES, seed=trainer.replica)
    trainer.tune(*next(data))
    steps = [trainer.step(*next(data)) for _ in range(STEPS)]
    trainer.close()
    return statistics.median(s.seconds for s in steps), steps[-1].loss, trainer.rank == 0


def main() -> None:
    for name, options in STREAMS.items():
        seconds, loss, prints = measured(name)
        if prints:
            print(f"{name:9} {1e3 * seconds:7.1f} ms/step  loss {loss:.6f}  {options}", flush=True)


if __name__ == "__main__":
    main()
