"""Detection of objects with an anchor-free network, evaluated by mean average precision.

A port of torchvision's references/detection with its FCOS model.

python detection.py
python detection.py launch=local launch.procs=2

The pictures are drawn here. Real ones come from a Dataset in the place of `Scenes`, for example
torchvision's CocoDetection. The average precision is of this file, at an overlap of one half:
torchmetrics has COCO's, which needs torchvision and pycocotools.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, max_pool2d

import echelon

# --- model and data

SIZE = 32
CELL = 4
"""The network looks for one object in every cell of so many pixels."""
CLASSES = 2


@dataclass
class Settings:
    lr: float = 0.005
    width: int = 32
    samples: int = 512
    eval_samples: int = 128


class Scenes(torch.utils.data.Dataset):
    """Noisy pictures with one to three squares (0) and discs (1), and their boxes and classes."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = random.Random(seed)
        self.scenes = [self._draw_scene(generator) for _ in range(samples)]
        noise = torch.Generator().manual_seed(seed)
        for picture, _, _ in self.scenes:
            picture += 0.1 * torch.randn(picture.shape, generator=noise)

    def _draw_scene(self, generator: random.Random) -> tuple[Tensor, Tensor, Tensor]:
        picture, boxes, labels = torch.zeros(1, SIZE, SIZE), [], []
        pixels = torch.arange(SIZE) + 0.5
        for corner in generator.sample(range(4), generator.randrange(1, 4)):
            radius, label = generator.uniform(3, 7), generator.randrange(CLASSES)
            x, y = (16 * place + 8 + generator.uniform(-1, 1) for place in divmod(corner, 2))
            right, down = (pixels - x).abs(), (pixels - y).abs().unsqueeze(1)
            far = torch.hypot(right, down) if label else torch.maximum(right, down)
            picture[0, far <= radius] = generator.uniform(0.5, 1.0)
            boxes.append([x - radius, y - radius, x + radius, y + radius])
            labels.append(label)
        return picture, torch.tensor(boxes), torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.scenes[index]


def join_scenes(scenes: list) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pictures, and a row for each object: its box, its class and the number of its
    picture."""
    pictures, boxes, labels = zip(*scenes, strict=True)
    counts = torch.tensor([len(each) for each in labels])
    owners = torch.repeat_interleave(torch.arange(len(scenes)), counts)
    return torch.stack(pictures), torch.cat(boxes), torch.cat(labels), owners


class Detector(nn.Module):
    """For every cell: is the middle of an object in it, of which class, how far are its edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, 1 + CLASSES + 4, 1),
        )
        nn.init.constant_(self.layers[-1].bias[:1], -3.0)  # most cells are empty

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, scores of the classes and boxes of all cells."""
        found = self.layers(pictures).movedim(1, -1)
        middles = CELL * (torch.arange(SIZE // CELL, device=found.device) + 0.5)
        down, right = torch.meshgrid(middles, middles, indexing="ij")
        edges = CELL * found[..., 3:].exp().clamp(max=SIZE)
        signs = torch.tensor([-1.0, -1.0, 1.0, 1.0], device=found.device)
        boxes = torch.stack([right, down, right, down], -1) + signs * edges
        return found[..., 0], found[..., 1 : 1 + CLASSES], boxes


def compute_losses(model: nn.Module, batch: tuple) -> dict[str, Tensor]:
    """Return the losses of a batch, summed over cells and objects: means over pictures."""
    pictures, boxes, labels, owners = batch
    scores, classes, found = model(pictures)
    column, row = ((boxes[:, :2] + boxes[:, 2:]) / 2 / CELL).long().unbind(1)
    places = (owners, row, column)
    wanted = torch.zeros_like(scores)
    wanted[places] = 1.0
    sums = {
        "loss_score": binary_cross_entropy_with_logits(scores, wanted, reduction="sum"),
        "loss_class": cross_entropy(classes[places], labels, reduction="sum"),
        "loss_box": (1 - compute_overlaps(found[places], boxes)).sum(),
    }
    return {name: value / len(pictures) for name, value in sums.items()}


def compute_overlaps(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over the union of boxes, which are broadcast."""
    size = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    common = size.clamp(min=0).prod(-1)
    areas = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1)
    return common / (areas - common)


def find_objects(model: nn.Module, pictures: Tensor) -> Tensor:
    """Return a row for each cell: its score, 0 beside a cell with a higher one; class; box."""
    scores, classes, boxes = model(pictures)
    scores = scores.sigmoid()
    peaks = scores * (scores == max_pool2d(scores, 3, stride=1, padding=1))
    columns = [peaks.unsqueeze(-1), classes.argmax(-1, keepdim=True).float(), boxes]
    return torch.cat(columns, -1).flatten(1, 2)


def compute_mean_average_precision(found: Tensor, data: Scenes) -> float:
    """Return the mean over classes of the area under precision over recall. `found` has the objects
    of every picture, as `find_objects` gives them."""
    _, boxes, labels, owners = join_scenes(data.scenes)
    pictures = torch.arange(len(found)).repeat_interleave(found.shape[1])
    found = found.flatten(0, 1)
    areas = []
    for label in range(CLASSES):
        is_guess = (found[:, 1] == label) & (found[:, 0] > 0.05)
        order = found[is_guess, 0].argsort(descending=True)
        guesses, places = found[is_guess][order], pictures[is_guess][order]
        is_wanted = labels == label
        overlaps = compute_overlaps(guesses[:, None, 2:], boxes[is_wanted])
        overlaps = overlaps * (places[:, None] == owners[is_wanted])
        hits = torch.zeros(len(guesses))
        for i, row in enumerate(overlaps):
            hits[i] = row.max() > 0.5
            if hits[i]:
                overlaps[:, row.argmax()] = 0.0  # an object is found once
        precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
        precision = precision.flip(0).cummax(0).values.flip(0)
        areas.append((hits * precision).sum() / is_wanted.sum())
    return float(torch.stack(areas).mean())


def draw_boxes(data: Scenes, found: Tensor) -> Tensor:
    """Return the first 16 pictures, with red boxes around the objects that were found."""
    pictures = torch.stack([picture for picture, _, _ in data.scenes[:16]]).repeat(1, 3, 1, 1)
    red = torch.tensor([1.0, 0.0, 0.0]).unsqueeze(1)
    for picture, cells in zip(pictures, found, strict=False):
        for score, _, *box in cells.tolist():
            if score > 0.5:
                left, top, right, bottom = (min(max(round(edge), 0), SIZE - 1) for edge in box)
                picture[:, [top, bottom], left : right + 1] = red.unsqueeze(1)
                picture[:, top : bottom + 1, [left, right]] = red.unsqueeze(1)
    return pictures.clamp(0, 1)


# --- training

DEFAULTS = ["trainer.epochs=12"]


def train(cfg: Settings, session: echelon.Session) -> None:
    model = Detector(cfg.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    data, eval_data = Scenes(cfg.samples, seed=0), Scenes(cfg.eval_samples, seed=1)
    for batch in session.batches(data, collate_fn=join_scenes):
        losses = compute_losses(model, batch)
        loss = sum(losses.values())
        session.backward(loss)
        session.step(optimizer, clip=10.0)
        session.log(loss=loss, **losses)
        if session.every(epochs=1):
            found = find_all_objects(model, eval_data, session)
            session.log(found=echelon.Image(draw_boxes(eval_data, found)))
            session.best(map=compute_mean_average_precision(found, eval_data))


@torch.no_grad()
def find_all_objects(model: nn.Module, data: Scenes, session: echelon.Session) -> Tensor:
    pictures = torch.stack([picture for picture, _, _ in data.scenes])
    found = [session.gather(find_objects(model, x)) for (x,) in session.eval_batches(pictures)]
    return torch.cat(found).cpu()


if __name__ == "__main__":
    echelon.main(train, defaults=DEFAULTS)
