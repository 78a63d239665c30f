"""Products that are never in memory, or a slab at a time: their regions among steps, and the graphs of these."""
