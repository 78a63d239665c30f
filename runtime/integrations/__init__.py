"""Test suites of others: every Function class compiled at its definition."""
