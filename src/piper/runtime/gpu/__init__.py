"""What only a GPU needs: CUDA graphs, shares of its SMs, warm-up."""
