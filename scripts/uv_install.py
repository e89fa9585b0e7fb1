"""`uv pip install` into the environment of this Python, from where pip would install.

uv reads neither pip.conf nor PIP_* variables. Echelon translates them for the environments of jobs.
Nothing is installed yet, so that one module is loaded by its path: unlike its package it needs only
the standard library.
"""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
sys.path.insert(0, str(SOURCE))
spec = spec_from_file_location(
    "package_indexes", SOURCE / "echelon/environments/package_indexes.py"
)
assert spec is not None
assert spec.loader is not None
indexes = sys.modules["package_indexes"] = module_from_spec(spec)
spec.loader.exec_module(indexes)

settings = indexes.read_pip_settings(os.environ, Path(sys.prefix))
flags = ["--python", sys.executable, *settings.make_install_flags("uv")]
variables = indexes.drop_redirecting_variables(os.environ)
variables |= settings.make_environment_variables("uv")
os.execvpe("uv", ["uv", "pip", "install", *flags, *sys.argv[1:]], variables)
