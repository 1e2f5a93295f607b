"""For GPUs only: CUDA graphs, warm-up."""
