"""Classifies points by the best snapshot of a run: python classify.py [RUN]"""

import sys

import torch
from classification import CLASSES, make_rings
from torchmetrics.functional.classification import multiclass_confusion_matrix

import echelon

model = echelon.load(sys.argv[1] if len(sys.argv) > 1 else "latest")
points, rings = make_rings(1000, seed=2)  # never seen in training
with torch.inference_mode():
    probabilities = model(points).softmax(dim=1)
    guesses = probabilities.argmax(dim=1)

for point, probability, guess in zip(points[:3], probabilities, guesses, strict=False):
    x, y = point.tolist()
    print(f"({x:5.2f}, {y:5.2f})  {CLASSES[guess]:<7}{probability[guess]:.0%}")
print(f"\n{(guesses == rings).float().mean():.1%} of {len(points)} points are right")
print(f"{'true, guessed':<15}" + "".join(f"{name:>8}" for name in CLASSES))
for name, row in zip(CLASSES, multiclass_confusion_matrix(guesses, rings, 3), strict=True):
    print(f"{name:<15}" + "".join(f"{count:8d}" for count in row.tolist()))
