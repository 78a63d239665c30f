"""Passes keep the program and make it cheaper: frozen values, valid graphs in and out."""
