"""Ready Functions, one a file, each to be copied as it is; `catalogue.CATALOGUE` lists them with arguments to try."""
