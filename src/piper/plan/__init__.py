"""One plan per device: the only thing a runtime has to know."""
