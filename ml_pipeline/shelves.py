"""Shelves: algorithms and worlds are packages, found by looking, that bring parts of their own.

A package on a shelf may have ``commands/``, one file per command, and ``conf/``, Hydra groups like
those of the main conf/. An installed package joins by an entry point of the group
``ml_pipeline.worlds``, whose value is its dotted path. No list names any of them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from ml_pipeline.errors import UserError, type_and_line

_SHELVES = ("ml_pipeline.algorithms", "ml_pipeline.worlds")
_GROUP = "ml_pipeline.worlds"
_PACKAGE = Path(__file__).resolve().parent
# A wheel has conf/ inside the package, a clone next to it.
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"


@cache
def packages() -> tuple[str, ...]:
    """The dotted paths of all packages on the shelves."""
    own = [
        f"{shelf}.{each.name}"
        for shelf in _SHELVES
        for each in sorted(iter_modules(_folders(shelf)))
        if each.ispkg
    ]
    foreign = sorted(each.value for each in entry_points(group=_GROUP))
    return tuple(dict.fromkeys([*own, *foreign]))


def command_modules() -> dict[str, str]:
    """The commands of the main package and of the shelves: name -> module."""
    commands: dict[str, str] = {}
    for place in ["ml_pipeline.commands", *(f"{each}.commands" for each in packages())]:
        for module in iter_modules(_folders(place)):
            if module.name in commands and not module.name.startswith("_"):
                raise UserError(f"{place}.{module.name}: {commands[module.name]} has this name")
            commands[module.name] = f"{place}.{module.name}"
    return {name: path for name, path in commands.items() if not name.startswith("_")}


@cache
def conf_folders() -> tuple[Path, ...]:
    """The conf/ of every package that has one."""
    folders = (Path(each) / "conf" for name in packages() for each in _folders(name))
    return tuple(folder for folder in folders if folder.is_dir())


def preset_files(group: str) -> dict[str, Path]:
    """The options of a config group that this package and its shelves bring, by name."""
    folders = [each / group for each in (CONF, *conf_folders())]
    files = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    return {path.stem: path for path in reversed(files)}  # as in Hydra, the first folder wins


def _folders(package: str) -> list[str]:
    """Where a package is on disk; empty if there is none of this name."""
    try:
        if find_spec(package) is None:
            return []
        return list(import_module(package).__path__)  # its __init__.py only
    except Exception as error:  # a foreign package may raise anything
        world = package.removesuffix(".commands")
        raise UserError(
            f"the entry point {_GROUP} of {world} does not work: {type_and_line(error)}; "
            "uninstall that package or repair it"
        ) from error
