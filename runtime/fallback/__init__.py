"""What answers where a call cannot be served: the user's own method, once, with the reason on record."""
