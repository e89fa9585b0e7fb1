"""Completion of command lines in bash, zsh and fish.

A shell asks at every press of the Tab key and has to be answered at once, so the modules here
import next to nothing: what can be typed is in `words.json`, which `make completion-words` writes.
"""
