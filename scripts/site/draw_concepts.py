"""Draw the pictures of docs/concepts: python scripts/site/draw_concepts.py

Each is an SVG of boxes, arrows and words. The colours are classes: those of a page come from
docs/assets/site.css, those of the file itself from the style in it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
_STYLE = """\
.ink{fill:#1f2430}.dim{fill:#6b7280}.line{stroke:#6b7280;fill:none}.tip{fill:#6b7280}\
.box{fill:#eef1f8;stroke:#9aa5c4}.a{fill:#cfe0ff;stroke:#5b7fd6}.b{fill:#ffe0cc;stroke:#d9864a}\
.c{fill:#d3f0dc;stroke:#4aa56a}.d{fill:#ecd9fa;stroke:#9a66c9}.bad{fill:#fbd3d3;stroke:#cc4b4b}\
@media (prefers-color-scheme:dark){.ink{fill:#e6e9f2}.dim{fill:#9aa3b5}.line{stroke:#9aa3b5}\
.tip{fill:#9aa3b5}.box{fill:#272c3a;stroke:#5a6480}.a{fill:#22355f;stroke:#6d93ee}\
.b{fill:#553520;stroke:#e59a61}.c{fill:#1f4a30;stroke:#5fbd80}.d{fill:#43285a;stroke:#b388dd}\
.bad{fill:#5c2424;stroke:#e06a6a}}"""
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"


class Drawing:
    """An SVG of a given size, with what was drawn so far."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.head = (
            f'<svg class="drawing" xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
            f'font-family="system-ui,sans-serif" font-size="14">'
        )
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        kind: str = "ink",
        *,
        anchor: str = "middle",
        size: int = 14,
        code: bool = False,
        bold: bool = False,
    ) -> None:
        """Write a line; `y` is its base line."""
        more = f' font-family="{_MONO}"' if code else ""
        more += ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}" '
            f'font-size="{size}"{more}>{escape(text)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *lines: str,
        kind: str = "box",
        code: bool = False,
        size: int = 14,
    ) -> None:
        """Draw a box with lines in its middle; the first is bold where there are several."""
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6"/>'
        )
        top = y + h / 2 + size * 0.35 - (len(lines) - 1) * size * 0.65
        for i, line in enumerate(lines):
            self.text(
                x + w / 2,
                top + i * size * 1.3,
                line,
                code=code,
                size=size,
                bold=len(lines) > 1 and i == 0,
            )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        """Draw a straight arrow, to the right or down."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke-width="1.5"{dash}/>'
        )
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        left = (x2 - 8 * dx - 4 * dy, y2 - 8 * dy + 4 * dx)
        right = (x2 - 8 * dx + 4 * dy, y2 - 8 * dy - 4 * dx)
        self.parts.append(
            f'<path class="tip" d="M{x2:g} {y2:g}L{left[0]:.1f} {left[1]:.1f}'
            f'L{right[0]:.1f} {right[1]:.1f}Z"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a dashed line."""
        self.parts.append(
            f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke-dasharray="4 4"/>'
        )

    def render(self) -> str:
        """Return the file."""
        return "\n".join([self.head, f"<style>{_STYLE}</style>", *self.parts, "</svg>", ""])


def draw_experiment_and_session() -> Drawing:
    """Two doors, one engine, any place."""
    d = Drawing(760, 330, "An experiment or a session, one engine, any launcher")
    d.text(150, 24, "you write one of these", "dim")
    d.box(
        20,
        40,
        260,
        92,
        "an experiment",
        "model, optimizer, loss, data",
        "Echelon has the loop",
        kind="a",
    )
    d.box(20, 160, 260, 92, "a session", "your own loop:", "backward · step · log", kind="b")
    d.arrow(280, 86, 340, 130)
    d.arrow(280, 206, 340, 160)
    d.text(430, 24, "the same engine", "dim")
    d.box(
        340,
        75,
        180,
        142,
        "every step",
        "batch in exact order",
        "gradients of all ranks",
        "metrics, snapshot",
        "stop between steps",
        size=13,
    )
    d.arrow(520, 146, 580, 146)
    d.text(660, 24, "anywhere", "dim")
    for i, place in enumerate(("inline", "local", "ssh", "slurm", "env", "k8s")):
        d.box(580, 40 + i * 36, 160, 28, f"launch={place}", code=True, size=12, kind="c")
    d.text(
        380, 296, "Your code does not change from left to right, only the word launch does.", "ink"
    )
    return d


def draw_world_and_plan() -> Drawing:
    """A command becomes a plan, and the plan a world."""
    d = Drawing(760, 340, "A command becomes a plan, the plan becomes processes on nodes")
    d.box(
        20, 30, 300, 54, "launch=slurm launch.nodes=2", "launch.gpus_per_node=2", code=True, size=13
    )
    d.arrow(320, 57, 390, 57)
    d.box(
        390, 30, 350, 54, "plan", "ranks, devices, variables, commands, script", kind="d", size=13
    )
    d.text(355, 48, "1", "dim")
    d.arrow(565, 84, 565, 124)
    d.text(582, 110, "2", "dim")
    for node in range(2):
        x = 20 + node * 370
        d.parts.append(
            f'<rect class="line" x="{x}" y="124" width="350" height="196" rx="8" '
            'stroke-dasharray="5 4"/>'
        )
        d.text(x + 16, 146, f"node {node}", "dim", anchor="start")
        d.box(x + 95, 134, 160, 34, "agent" + (" (leads)" if node == 0 else ""), kind="box")
        for local in range(2):
            rank = node * 2 + local
            left = x + 20 + local * 165
            d.arrow(x + 175, 168, left + 72, 198)
            d.box(left, 198, 145, 52, f"rank {rank} of 4", f"local rank {local}", kind="a", size=13)
            d.arrow(left + 72, 250, left + 72, 272)
            d.box(left, 272, 145, 32, f"cuda:{local}", kind="c", code=True, size=13)
    d.arrow(275, 151, 485, 151, dashed=True)
    d.text(322, 143, "rendezvous", "dim", size=12)
    return d


def draw_run_folder() -> Drawing:
    """Who writes into a run folder, and who reads it."""
    d = Drawing(760, 350, "One training writes into a run folder, many commands read it")
    d.text(100, 24, "one writer", "dim")
    d.box(20, 130, 160, 80, "the training", "all its ranks,", "one lock", kind="a")
    d.arrow(180, 170, 240, 170)
    rows = (
        ("config.json", "the resolved settings"),
        ("status.json", "state, step, first failure"),
        ("metrics.jsonl", "a line per log step"),
        ("history.jsonl", "every start and stop"),
        ("snapshots/step-N/", "weights, position"),
        ("snapshots/best", "a link to the best"),
        ("logs/rank-N.log", "what each rank printed"),
    )
    d.parts.append('<rect class="box" x="240" y="40" width="330" height="284" rx="8"/>')
    d.text(256, 64, "runs/NAME/", anchor="start", code=True, bold=True)
    for i, (name, what) in enumerate(rows):
        d.text(264, 96 + i * 33, name, anchor="start", code=True, size=13)
        d.text(556, 96 + i * 33, what, "dim", anchor="end", size=12)
    d.arrow(570, 180, 620, 180)
    d.text(680, 24, "many readers", "dim")
    for i, verb in enumerate(("runs", "show", "plot", "logs", "jobs", "board", "resume")):
        d.box(620, 40 + i * 41, 120, 32, f"echelon {verb}", code=True, size=12, kind="c")
    return d


def draw_order_of_samples() -> Drawing:
    """The same samples meet in a step at any number of processes."""
    d = Drawing(760, 320, "The same global batches on one, two and four processes")
    order = (7, 2, 11, 5, 0, 9, 4, 1, 10, 6, 3, 8)
    d.text(20, 32, "order of epoch 1 = f(seed, epoch, position)", anchor="start", bold=True)
    for row, procs in enumerate((1, 2, 4)):
        y = 62 + row * 78
        d.text(20, y + 25, f"{procs} process{'es' if procs > 1 else ''}", anchor="start")
        for i, sample in enumerate(order):
            rank = (i % 4) * procs // 4
            x = 150 + i * 42 + (i // 4) * 24
            d.box(x, y, 36, 38, str(sample), kind="abcd"[rank], size=14)
        if row == 0:
            for batch in range(3):
                d.text(150 + batch * 192 + 81, 54, f"batch {batch + 1}", "dim", size=12)
    for rank in range(4):
        d.box(150 + rank * 110, 288, 18, 18, "", kind="abcd"[rank])
        d.text(176 + rank * 110, 302, f"rank {rank}", "dim", anchor="start", size=13)
    return d


def draw_snapshots() -> Drawing:
    """A run is killed and goes on after its newest snapshot."""
    d = Drawing(760, 300, "A run is killed after step 347 and resumes after step 300")
    d.text(20, 30, "first start", "dim", anchor="start")
    d.arrow(40, 70, 560, 70)
    for i, step in enumerate((100, 200, 300)):
        x = 160 + i * 130
        d.box(x - 42, 50, 84, 40, f"step {step}", kind="c", size=13)
    d.box(500, 50, 90, 40, "kill -9", kind="bad", size=13)
    d.text(545, 108, "in step 348", "dim", size=12)
    d.arrow(420, 90, 420, 150, dashed=True)
    d.text(430, 128, "newest valid snapshot", "dim", anchor="start", size=12)
    d.text(20, 152, "same command", "dim", anchor="start")
    d.arrow(420, 172, 700, 172)
    d.box(400, 152, 110, 40, "step 301 …", kind="a", size=13)
    d.text(20, 226, "how one is written", anchor="start", bold=True)
    for i, (line, more) in enumerate(
        (
            ("files beside", "flushed"),
            ("manifest last", "with checksums"),
            ("rename", "complete or absent"),
        )
    ):
        d.box(20 + i * 245, 240, 200, 46, line, more, size=13)
        if i:
            d.arrow(20 + i * 245 - 45, 263, 20 + i * 245, 263)
    return d


def draw_lost_ranks() -> Drawing:
    """A rank dies; the others make the step again, and a replacement joins."""
    d = Drawing(
        760, 330, "Rank 2 is killed in step 5; the others repeat it and take in a replacement"
    )
    columns = ("step 4", "step 5", "step 5 again", "step 6", "step 7")
    for i, name in enumerate(columns):
        d.text(185 + i * 125, 30, name, "dim", size=13)
    for rank in range(4):
        y = 44 + rank * 56
        d.text(20, y + 26, f"rank {rank}", anchor="start")
        for i in range(5):
            x = 130 + i * 125
            if rank == 2 and i == 1:
                d.box(x, y, 110, 40, "killed", kind="bad", size=13)
            elif rank == 2 and i in (2, 3):
                d.box(x, y, 110, 40, "starting" if i == 3 else "", size=13)
            elif i == 1:
                d.box(x, y, 110, 40, "cut short", size=13)
            else:
                share = "1/3" if i in (2, 3) else "1/4"
                d.box(x, y, 110, 40, f"{share} of the batch", kind="abcd"[rank], size=13)
    d.text(380, 296, "The batch of step 5 is trained whole, by three. No sample is lost,", "ink")
    d.text(
        380, 316, "and the replacement joins between two steps with the state of the others.", "ink"
    )
    return d


PICTURES = {
    "experiment_and_session": draw_experiment_and_session,
    "world_and_plan": draw_world_and_plan,
    "run_folder": draw_run_folder,
    "order_of_samples": draw_order_of_samples,
    "snapshots": draw_snapshots,
    "lost_ranks": draw_lost_ranks,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().render(), encoding="utf-8")
