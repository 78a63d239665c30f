"""What a class became, for other programs: modules, bundles, graphs."""
