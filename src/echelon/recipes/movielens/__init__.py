"""A recommender on MovieLens: its data, three experiments, and recommendations for a user."""
