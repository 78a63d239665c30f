"""Loop Functions as researchers write them, by kind: a table of classes with hand-written backwards."""

from . import cells, programs, scans, series
from .table import FUNCTIONS, LoopFunction

__all__ = ["FUNCTIONS", "LoopFunction", "cells", "programs", "scans", "series"]
