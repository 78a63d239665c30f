"""Products that are never in memory: their regions among steps, and the graphs of these."""
