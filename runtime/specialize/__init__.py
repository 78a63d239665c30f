"""One class, one kind of call: the table of specializations, residuals, records, backward."""
