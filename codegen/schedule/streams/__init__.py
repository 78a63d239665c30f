"""Streams planned: which axis a kernel walks, what it accumulates on the way, and where along it anything is alive."""
