"""The user's optimizer and scheduler: made, tried on small parameters, refused if need be."""
