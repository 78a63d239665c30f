"""The graph of a region in the spelling that kernels walk: each module rewrites one thing, and says which."""
