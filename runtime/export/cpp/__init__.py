"""The C++ pair for libtorch."""
