"""One run of the user's Python on fake tensors, recorded as a graph of ATen operations."""
