"""Draw docs/gpus.svg: PYTHONPATH=src python tests/gpus/draw_gpus_svg.py"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from test_gpu_tables import NODE, OURS, RUN, TRAINING, _gpu, _process  # type: ignore[import-not-found]

from echelon.gpus.terminal import paint_line, render_gpu_table

WIDTH = 124
TARGET = Path(__file__).parents[2] / "docs" / "gpus.svg"
_OWN_FONTS = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Nothing is fetched from elsewhere to look at it."""


def draw() -> None:
    kevin = [(_process("kevin", 90711 + i, 60.2, 11100, TRAINING),) for i in range(2)]
    maria = [(_process("maria", 80415 + i, 130.4, 420, OURS, **RUN),) for i in range(2)]
    busy = (
        _gpu(0, 97, 61, 64, 612, processes=kevin[0]),
        _gpu(1, 96, 61, 66, 618, processes=kevin[1]),
        _gpu(2, 100, 131, 78, 698, processes=maria[0]),
        _gpu(3, 99, 131, 86, 697, processes=maria[1]),
    )
    free, lost, _, left, cut = NODE.gpus[2:]
    rest = [gpu._replace(index=4 + i) for i, gpu in enumerate((free, lost, left, cut))]
    node = NODE._replace(gpus=(*busy, *rest))
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in render_gpu_table([node], WIDTH, highlighted_user="maria", clock="14:03:12"):
        console.print(Text.from_ansi(paint_line(line, use_colour=True)), soft_wrap=True)
    console.save_svg(str(TARGET), title="echelon gpus --watch", code_format=_OWN_FONTS)


if __name__ == "__main__":
    draw()
