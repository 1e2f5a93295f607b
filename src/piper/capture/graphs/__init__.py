"""A region's joint graph, partitioned into one graph per phase."""
