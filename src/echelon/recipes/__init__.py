"""The bundled experiments: `echelon train experiment=NAME`."""
