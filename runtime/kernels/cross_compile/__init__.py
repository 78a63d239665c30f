"""Kernels compiled in worker processes for GPUs that need not be there, and what the machine code says."""
