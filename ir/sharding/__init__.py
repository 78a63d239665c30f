"""How a graph may be computed in parts: one dim of some inputs divided among ranks."""
