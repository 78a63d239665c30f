"""Settings of the process: configuration, loggers, counters. The ground of the runtime."""
