"""The compiled class beside its own methods: modes, dtypes, layouts, sizes."""
