"""Bundled experiments and what belongs to them. `echelon train experiment=NAME` trains one.

Recipes use the core like a user's own code does: no package of the core imports them. They are
found by the `entry` of their file in conf/experiment, their commands by the table in cli.py.
"""
