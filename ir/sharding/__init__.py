"""Rules for computing a graph in parts: one dim of some inputs divided among ranks."""
