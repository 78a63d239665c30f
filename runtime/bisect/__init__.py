"""The first step of the compiler that makes a difference."""
