"""A method captured as a graph: its guards, the comparison of the first call with the user's method, what a graph cannot hold."""
