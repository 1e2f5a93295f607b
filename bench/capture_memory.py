"""Capture and compile a 70B-parameter Llama: time and peak memory.

    python bench/capture_memory.py

Goal: under 2 GB. The model is on meta, so only the graphs take memory.
"""

from __future__ import annotations

import resource
import time

import torch
from common import save

from piper.capture import capture
from piper.job.compile.compiler import compile_strategy
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.strategies import one_f_one_b

CONFIG = LlamaConfig(
    vocab=128_256, dim=8192, layers=80, heads=64, kv_heads=8, hidden=28_672, rope_base=5e5
)
STAGES = 16


def main() -> None:
    with torch.device("meta"):
        model = Llama(CONFIG, STAGES)
    count = sum(parameter.numel() for parameter in model.parameters())
    tokens = torch.zeros(1, 4096, dtype=torch.int64)
    started = time.perf_counter()
    captured = capture(model, cross_entropy, (tokens, tokens))
    seconds = time.perf_counter() - started
    codes = {region.code for region in captured.model.regions}
    strategy = one_f_one_b(pp=STAGES, microbatches=64)
    compiled = compile_strategy(captured.model, strategy.directives)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{count / 1e9:.1f}B parameters: captured in {seconds:.1f} s, {STAGES} regions of which "
        f"{len(codes)} unique, {len(compiled.dag.nodes)} nodes; peak {peak:.2f} GiB"
    )
    save("capture_memory", {"parameters": count, "seconds": seconds, "peak_gib": peak})


if __name__ == "__main__":
    main()
