"""What runs on the login node, for as long as one ssh session: short answers to one laptop.

Nothing here imports a package that a login node may lack (torch, Hydra, psutil, rich).
"""
