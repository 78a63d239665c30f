"""Fallback: a call that cannot be served is answered by the user's own method, once, with the reason on record."""
