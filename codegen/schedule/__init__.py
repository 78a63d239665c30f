"""Which axis is walked by whom: named axes, sizes, roles, phases. Nothing is text yet."""
