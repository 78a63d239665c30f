"""A GPU's first day: one command that does, in slices of minutes, what a first GPU allows, in order of value.

`steps.py` is the table of what is done, `checks.py`, `times.py`, `uses.py` and `tools.py` do it, a process each
(`worker.py`, asked by `child.py`); `day.py` divides the time, `record.py` holds what came of it, `page.py` tells it.
"""
