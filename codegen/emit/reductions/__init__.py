"""Reductions in text: lanes folded, accumulators, partial sums in memory, and the last program that adds them."""
