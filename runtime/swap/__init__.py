"""Modules of a model with other methods, in place and revertibly."""
