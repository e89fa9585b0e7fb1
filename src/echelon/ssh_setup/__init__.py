"""Making machines ready that are not: `echelon setup ssh HOST`."""
