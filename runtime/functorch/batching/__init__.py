"""Batching rules: of the IR, of ATen operations, and those that torch has."""
