"""Loop Functions as researchers write them, by kind: a table of classes with hand-written backwards."""
