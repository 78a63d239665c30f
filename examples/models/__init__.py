"""Replacements for whole models, for `fusegrad.swap`."""
