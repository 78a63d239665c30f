"""Where a program reads and writes: lanes of a tile, coordinates of axes, addresses, masks, loads, bytes moved."""
