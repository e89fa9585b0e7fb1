"""MovieLens as a recipe: its data, three experiments and `echelon recommend`.

This module imports nothing, because `echelon data movielens` needs no torch.
"""
