"""Regions: the cut of the graph, and the layers of a model whose source you do not change."""
