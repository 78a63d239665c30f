"""Loops over time to Triton text: what is carried in registers, a step per turn, and stores as they come."""
