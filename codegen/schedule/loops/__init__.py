"""Loops over time as kernels: what is carried, which axes a program covers whole, blocks, and turns in flight."""
