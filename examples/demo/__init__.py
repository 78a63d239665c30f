"""The language model that `fusegrad demo` trains."""
