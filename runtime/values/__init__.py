"""Sizes and tensors as values: size expressions evaluated exactly, specifications of tensors, predicates."""
