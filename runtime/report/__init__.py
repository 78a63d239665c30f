"""What a class became, for people: explain, residuals, pictures, pages, terminal."""
