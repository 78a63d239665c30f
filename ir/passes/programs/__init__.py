"""Passes over forward and backward at once: programs in and out, cheaper by what one does for the other."""
