"""The cheapest placements of all values of a graph."""
