"""The inline cache: for each call signature a generated function that checks its guards and runs."""
