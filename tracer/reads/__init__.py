"""The reads and changes of a method besides its arguments, and their comparison at each call."""
