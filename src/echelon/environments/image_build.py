"""Building the image of a source folder, once, with the builder that is there.

What is built is kept by the key of its recipe: in the storage of podman, or as a file of Apptainer
or a folder of Charliecloud in the cache.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from echelon.environments.build_lock import PrintLine, wait_for_lock
from echelon.environments.image_recipe import (
    ImageRecipe,
    plan_image,
    write_build_files,
)
from echelon.environments.package_indexes import hide_passwords
from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest
from echelon.utils.cache_root import get_cache_root
from echelon.utils.processes import die_with_parent
from echelon.utils.text import print_to_stderr

_LAST_LINES = 20


class ImageBuilder(ABC):
    """A program that makes images from recipes."""

    name: ClassVar[str]
    """As `--builder` takes it."""
    runtime: ClassVar[str]
    """The `launch.container_runtime` of its images."""
    programs: ClassVar[tuple[str, ...]]

    def __init__(self, program: str, recipe: ImageRecipe, folder: Path) -> None:
        self.program, self.recipe, self.folder = program, recipe, folder

    @property
    @abstractmethod
    def image(self) -> str:
        """The image as `launch.container` takes it."""

    @abstractmethod
    def make_commands(self, work: Path, mounts: Sequence[tuple[str, str]]) -> list[list[str]]:
        """Return the commands that build it. `work` has the recipes, and `mounts` are folders here
        that the build sees elsewhere."""

    def is_built(self) -> bool:
        """Return whether the image is there."""
        return Path(self.image).exists()

    def render_recipe(self) -> str:
        """Return the recipe as this builder reads it."""
        return self.recipe.render_containerfile()


class PodmanBuilder(ImageBuilder):
    name, runtime, programs = "podman", "podman", ("podman",)

    @property
    def image(self) -> str:
        return f"localhost/echelon-env:{self.recipe.key}"

    def make_commands(self, work: Path, mounts: Sequence[tuple[str, str]]) -> list[list[str]]:
        file, source = str(work / "Containerfile"), str(self.recipe.plan.source)
        options = ["--tag", self.image, "--file", file, "--network=host"]
        options += [f"--volume={here}:{there}:ro" for here, there in mounts]
        return [[self.program, "build", *options, source]]

    def is_built(self) -> bool:
        asked = [self.program, "image", "exists", self.image]
        return subprocess.run(asked, capture_output=True).returncode == 0


class ApptainerBuilder(ImageBuilder):
    name, runtime, programs = "apptainer", "apptainer", ("apptainer", "singularity")

    @property
    def image(self) -> str:
        return str(self.folder / f"{self.recipe.key}.sif")

    def make_commands(self, work: Path, mounts: Sequence[tuple[str, str]]) -> list[list[str]]:
        # Built beside, so that half of a file is never taken for an image.
        half = str(self.folder / f".{self.recipe.key}.sif")
        options = ["--force", *(f"--bind={here}:{there}" for here, there in mounts)]
        build = [self.program, "build", *options, half, str(work / "image.def")]
        return [build, ["mv", half, self.image]]

    def render_recipe(self) -> str:
        return self.recipe.render_definition()


class CharliecloudBuilder(ImageBuilder):
    name, runtime, programs = "ch-image", "charliecloud", ("ch-image",)

    @property
    def image(self) -> str:
        return str(self.folder / self.recipe.key)

    def make_commands(self, work: Path, mounts: Sequence[tuple[str, str]]) -> list[list[str]]:
        tag, file = f"echelon-env:{self.recipe.key}", str(work / "Containerfile")
        half = str(self.folder / f".{self.recipe.key}")
        options = ["--tag", tag, "--file", file]
        options += [f"--bind={here}:{there}" for here, there in mounts]
        return [
            [self.program, "build", *options, str(self.recipe.plan.source)],
            ["rm", "-rf", half],
            ["ch-convert", "--in-fmt=ch-image", "--out-fmt=dir", tag, half],
            ["mv", half, self.image],
        ]


BUILDERS: tuple[type[ImageBuilder], ...] = (PodmanBuilder, ApptainerBuilder, CharliecloudBuilder)
"""The first one that is there is taken."""


def build_image(
    source: Path,
    base: str | None,
    python: str,
    wanted: str | None,
    recipe_only: bool,
    as_json: bool,
    environ: Mapping[str, str],
    print_line: PrintLine = print_to_stderr,
) -> int:
    """Build the image of a source folder unless it is there, and print it; with `recipe_only`
    print the recipe instead."""
    recipe = plan_image(source, base, python, environ)
    if wanted is not None and wanted not in (known := [b.name for b in BUILDERS]):
        raise EchelonError(Fault(f"--builder {wanted}", suggest_nearest(wanted, known)))
    folder = get_cache_root(environ) / "images"
    builder = _choose_builder(recipe, folder, wanted, environ, recipe_only)
    if not recipe_only:
        _build_once(builder, environ, print_line)
    described = {
        "image": builder.image,
        "runtime": builder.runtime,
        "key": recipe.key,
        "recipe": builder.render_recipe(),
    }
    if as_json:
        print(json.dumps(described, indent=2))
    elif recipe_only:
        print(builder.render_recipe(), end="")
    else:
        print(builder.image)
    return ExitCode.OK


def _choose_builder(
    recipe: ImageRecipe,
    folder: Path,
    wanted: str | None,
    environ: Mapping[str, str],
    recipe_only: bool,
) -> ImageBuilder:
    """Return the builder that was asked for, or the first that is there. A recipe needs none."""
    for kind in BUILDERS:
        found = (shutil.which(p, path=environ.get("PATH")) for p in kind.programs)
        program = next((path for path in found if path), None)
        if program and wanted in (None, kind.name):
            return kind(program, recipe, folder)
    if recipe_only:
        kind = next((b for b in BUILDERS if b.name == wanted), BUILDERS[0])
        return kind(kind.programs[0], recipe, folder)
    what = "none of podman, apptainer and ch-image is on the PATH, which build images"
    if wanted:
        what = f"--builder {wanted}: it is not on the PATH"
    raise EchelonError(
        Fault(
            what,
            "install one (apt-get install podman), load a module, or take the recipe to a machine "
            "that has one: echelon env build --container --recipe",
        ),
        exit=ExitCode.NOT_FOUND,
    )


def _build_once(builder: ImageBuilder, environ: Mapping[str, str], print_line: PrintLine) -> None:
    """Build the image unless it is there; others who want it wait."""
    builder.folder.mkdir(parents=True, exist_ok=True)
    if builder.is_built():
        return
    lock = builder.folder / f"{builder.recipe.key}.lock"
    with wait_for_lock(lock, "this image", print_line):
        if builder.is_built():
            return
        names = ", ".join(file.name for file in builder.recipe.plan.files)
        print_line(f"building {builder.image} with {builder.name}: {names}")
        with tempfile.TemporaryDirectory(prefix="echelon-image-") as work:
            mounts = write_build_files(builder.recipe, Path(work))
            for command in builder.make_commands(Path(work), mounts):
                _run(command, environ, print_line)


def _run(command: list[str], environ: Mapping[str, str], print_line: PrintLine) -> None:
    """Run a command of a builder and pass on what it prints; raise if it fails."""
    last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    process = subprocess.Popen(
        command,
        env={"USER": str(os.getuid()), **environ},  # ch-image does not start without
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            last.append(hide_passwords(line.rstrip()))
            print_line(f"  {last[-1]}")
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code == 0:
        return
    said = [line for line in last if line.strip()]
    cause = next((line for line in reversed(said) if "rror" in line), said[-1] if said else "")
    program = Path(command[0]).name
    with contextlib.suppress(ValueError):
        cause = cause[cause.lower().index("error") :]
    raise EchelonError(
        Fault(
            f"{program} could not build the image (exit code {code}): {cause or 'it said nothing'}",
            "see the lines above; --recipe prints what was built, --base names another base",
        ),
        exit=ExitCode.FAILED,
    )
