"""The readme of the package: README.md with absolute links. Everything else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]

readme = (ROOT / "README.md").read_text(encoding="utf-8")
readme = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{REPOSITORY}/raw/main/", readme)  # pictures
readme = re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:)", rf"\1{REPOSITORY}/blob/main/", readme)  # pages
setup(long_description=readme, long_description_content_type="text/markdown")
