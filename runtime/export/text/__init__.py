"""What the exports to Python and to C++ share: names, sizes as expressions, the steps of a launch function."""
