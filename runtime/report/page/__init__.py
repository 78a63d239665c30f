"""A report as HTML, light or dark, on one page without scripts or requests, and its drawings."""
