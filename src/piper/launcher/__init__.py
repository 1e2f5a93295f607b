"""Start the processes of a run: on this host, or as actors of a Ray cluster."""
