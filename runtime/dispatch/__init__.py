"""The entrance of calls: compiled classes and functions, and the choice of the way that a call takes."""
