"""`echelon submit`: commands from a file, an environment, the code as it was, as jobs."""
