"""A bundle: one verified archive that `fusegrad.load` reads without executing anything of it."""
