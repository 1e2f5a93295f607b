"""Does what a forward remembers of one kind of batch, or state, matter to another?"""
