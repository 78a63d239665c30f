"""One compiled class: its options and methods, its specializations by key, backward, and what runs in eager.

Begin with `compiled.Compiled`, which holds the parts, and finds or makes what serves a call.
"""
