"""Start the processes of a run: local ones, those of torchrun, or actors of a Ray cluster."""
