"""Regions: annotations and tags, the cut of the graph, and buckets of parameters."""
