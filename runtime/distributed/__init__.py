"""Calls on DTensors: placements, sharding rules derived from the graphs, local execution."""
