"""Every Function class compiled as it is defined: the name under which scripts import it."""

from .integrations.compile_everything import Everywhere, every_function, summary

__all__ = ["Everywhere", "every_function", "summary"]
