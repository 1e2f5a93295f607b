"""Losses of microbatches as one loss: what a loss divides by, by proof, weights or trial."""
