"""Passes over loops: what a step does that all steps may do at once leaves the loop."""
