"""What plans say before they run: memory, traffic, communicators, CUDA graph segments."""
