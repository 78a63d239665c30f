"""Identities that hold bit for bit: what `simplify` rewrites by."""
