"""Train a mixture of experts on real text: DualPipeV, PP=2 x EP=2 on four processes.

    piper show examples/train_experts.py   # the order of overlapping work, and what it hides
    piper run examples/train_experts.py -n 4
    piper run examples/train_experts.py -n 4 --schedule 1f1b --streams one

Each device holds half of the experts of its layers. Tokens travel to their experts and back while
the device computes another microbatch. `--tune` measures regions and messages first, and orders
overlapping work by the result.
"""

import argparse
from functools import partial

import torch
from train_text import TWO_PER_RANK, batches, library_text

import piper
from piper.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig, moe_loss

PP, EP = 2, 2
# The three choices of the published work, as options of the builder.
STREAMS = {
    "separate": {"reduce_stream": "dp"},
    "one": {"reduce_stream": "ep"},  # reductions and token all-to-alls wait for each other
    "buckets": {"reduce_stream": "dp", "bucket_mb": 0.25},
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--schedule", default="dualpipev", choices=sorted(piper.strategies.BUILDERS)
    )
    parser.add_argument("--streams", default="separate", choices=STREAMS)
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tune", action="store_true")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    stages = PP * (2 if chosen.schedule in TWO_PER_RANK else 1)
    strategy = piper.strategies.BUILDERS[chosen.schedule](
        pp=PP, dp=EP, ep=EP, zero=chosen.zero, microbatches=chosen.microbatches,
        **STREAMS[chosen.streams],
    )  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab=256, dim=chosen.dim, layers=4, heads=4, kv_heads=2, head_dim=16, experts=8,
        expert_hidden=2 * chosen.dim,
    )  # fmt: skip
    trainer = piper.Trainer(
        Qwen3Moe(config, stages),
        moe_loss,
        strategy,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        example=next(batches(library_text(), rows=chosen.microbatches)),
        max_norm=1.0,
    )
    data = batches(library_text(), rows=chosen.microbatches, seed=trainer.replica)
    if chosen.tune:
        trainer.tune(*next(data))
    for _ in range(chosen.steps):
        metrics = trainer.step(*next(data))
        if trainer.rank == 0:
            print(metrics, flush=True)


if __name__ == "__main__":
    main()
