"""A method traced as a graph: its guards, the first call compared with the user's method, what no graph holds."""
