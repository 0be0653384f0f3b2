"""The public modules, found where they lie, and every public name."""

import importlib
from pathlib import Path
from types import ModuleType

import penstock


def public_modules() -> list[ModuleType]:
    """Return `penstock` and every public module below it."""
    folder = Path(penstock.__path__[0])
    stems = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")]
    stems += [
        f"integrations.{path.stem}" for path in (folder / "integrations").glob("*.py") if not path.stem.startswith("_")
    ]
    return [penstock, *(importlib.import_module(f"penstock.{stem}") for stem in sorted(stems))]


def public_names() -> list[tuple[str, object]]:
    """Return every public name with its value."""
    return [(name, getattr(module, name)) for module in public_modules() for name in module.__all__]
