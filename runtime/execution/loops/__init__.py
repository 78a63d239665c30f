"""Loops over time that have no kernel: run step by step by the plan of their body."""
