"""Transforms derive another program from one: batch, linearize, transpose."""
