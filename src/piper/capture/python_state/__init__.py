"""What a forward keeps in Python: everything that its code can reach, before and after a trace."""
