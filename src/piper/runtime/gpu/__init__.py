"""For GPUs only: CUDA graphs, shares of SMs, warm-up."""
