"""A graph run operation by operation by torch: the reference executor."""
