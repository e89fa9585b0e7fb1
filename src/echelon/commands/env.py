"""`echelon env`: the environment of a source folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from echelon.commands.arguments import make_parser, parse_days


def env(words: list[str]) -> int:
    """`echelon env build|show|clean`."""
    parser = make_parser(
        "env",
        "The environment that a source folder asks for: build it, show it, clean the cache.",
        "The first of these files decides, and is printed: Pipfile (with its lock),\n"
        "requirements.txt, uv.lock, pyproject.toml, environment.yml. It is built with uv where\n"
        "there is one (ECHELON_ENV_BUILDER=pip asks for pip), once, and kept in ~/.cache/echelon\n"
        "(ECHELON_CACHE) by what decides it.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="build|show|clean")
    build = actions.add_parser("build", help="build it if it is not there, and print its folder")
    show = actions.add_parser("show", help="which file decides, where it is, what the cache holds")
    for action in (build, show):
        action.add_argument("--source", default=".", help="the folder with the files (default: .)")
        action.add_argument("--where", default="cache", help="cache, or source: its .venv")
        action.add_argument("--python", default=sys.executable, help="the interpreter to use")
        action.add_argument("--json", action="store_true")
    build.add_argument("--shell", action="store_true", help="print the lines that enter it")
    image = build.add_argument_group(
        "an image in its place",
        "Made from the same files, for launch.container. Its name or path is printed.",
    )
    image.add_argument("--container", action="store_true", help="build an image of a container")
    image.add_argument("--recipe", action="store_true", help="only print the recipe of the image")
    image.add_argument("--base", metavar="IMAGE", help="what it begins with (default: python:X.Y)")
    image.add_argument("--builder", metavar="NAME", help="podman, apptainer or ch-image")
    clean = actions.add_parser("clean", help="remove from the cache what was not used for long")
    clean.add_argument("--older", type=parse_days, default=30.0, metavar="DAYS", help="default: 30")
    clean.add_argument("--all", action="store_true", help="all that no job runs in")
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    given = parser.parse_args(words)
    from echelon.environments import env_command as env

    if given.action == "clean":
        return env.clean_environments(given.older, given.all, given.dry_run)
    source = Path(given.source)
    if given.action == "show":
        return env.show_environment(source, given.where, given.python, given.json)
    if given.container:
        if given.where != "cache" or given.shell:
            parser.error("--container builds an image: leave --where and --shell out")
        from echelon.environments.image_build import build_image

        return build_image(
            source,
            given.base,
            given.python,
            given.builder,
            given.recipe,
            given.json,
            os.environ,
        )
    if given.recipe or given.base or given.builder:
        parser.error("--recipe, --base and --builder are for --container")
    return env.make_environment(source, given.where, given.python, given.json, given.shell)
