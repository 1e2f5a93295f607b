"""What goes into a model and comes out of it, as a trace sees it."""
