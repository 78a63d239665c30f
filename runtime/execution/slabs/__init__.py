"""Regions that are walked in slabs of rows: where a slab's results go, and the loop over slabs."""
