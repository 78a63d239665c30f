"""A scheduled program to Triton text: coordinates, values on demand, reductions, the finish."""
