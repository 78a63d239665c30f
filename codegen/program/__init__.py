"""A group's graph as a program over named axes: indices, terms, sinks. No decision about speed is taken here."""
