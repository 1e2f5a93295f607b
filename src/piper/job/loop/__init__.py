"""What a training loop has around its steps: metrics, traces, modes of torch, the user's model."""
