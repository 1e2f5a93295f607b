"""Marks on a forward: which operation belongs to which region."""
