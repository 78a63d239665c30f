"""A readable Triton module that needs torch and triton alone."""
