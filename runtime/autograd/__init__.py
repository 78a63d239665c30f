"""Calls under plain autograd: the node, what it keeps, and graph breaks inside a method."""
