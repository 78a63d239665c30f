"""A traced graph made executable: lowered, fused into groups, generated, and run as a plan of launches."""
