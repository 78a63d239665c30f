"""Modules of a model given other methods in place, and back again."""
