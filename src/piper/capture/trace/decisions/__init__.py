"""Random decisions of a model: both ways in one graph."""
