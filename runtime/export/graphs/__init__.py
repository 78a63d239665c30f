"""Graphs as data and as pages."""
