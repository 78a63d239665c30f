"""Calls and lines that stay the user's own, between the compiled segments of a graph."""
