"""Messages between processes that share a GPU: through memory that they open for each other."""
