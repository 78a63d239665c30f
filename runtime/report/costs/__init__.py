"""What a direction costs besides its kernels: in eager, in memory, slab by slab."""
