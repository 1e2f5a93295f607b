"""From tags to regions: annotations, the cut, and parameters in buckets."""
