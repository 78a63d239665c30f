"""The common part of the exports to Python and C++: names, sizes as expressions, the steps of a launch function."""
