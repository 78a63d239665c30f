"""Time: measured on the machine at hand, and modelled for a GPU by its data sheet."""
