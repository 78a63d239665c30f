"""A compiled class written for other programs: modules, bundles, graphs."""
