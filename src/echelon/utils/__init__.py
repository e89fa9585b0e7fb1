"""Rules that several packages share, each written once: text, files, locks, processes.

Nothing here imports another package of Echelon or anything outside the standard library, so every
package may use it and importing it is cheap.
"""
