"""Streams in text: tiles of two axes, products of them, loops with running sums that are rescaled."""
