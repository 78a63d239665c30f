"""Reports for people on a compiled class: explain, residuals, pictures, pages, terminal."""
