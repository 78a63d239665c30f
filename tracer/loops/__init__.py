"""Loops over a size: found in short traces, rolled into one node, proved by unrolling it at another length."""
