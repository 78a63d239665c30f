"""Loops over time: the body of a `scan`, what it means step by step, and how the transforms go into it."""
