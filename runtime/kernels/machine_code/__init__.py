"""The machine code of a kernel, read instead of timed: what one warp issues, by pipe, and a model of the launch."""
