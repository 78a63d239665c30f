"""The decisions about speed: roles of axes, residency of rows, tile sizes, reduction plan. Nothing is text yet."""
