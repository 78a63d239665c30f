"""Graphs and conditions as text and as plain data, and their way back."""
