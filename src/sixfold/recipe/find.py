"""Find recipe files by path or by the name of a shipped recipe. No torch."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from ..errors import UserError, nearest

_MAX_BYTES = 1 << 20


def shipped_recipes(kind: str = "") -> dict[str, Path]:
    """Recipes known by name.

    They are those in ./recipes, and those of the checkout or the installed package.

    Args:
        kind: folder of recipes that are none of training, such as "curation".
    """
    inside = f"recipes/{kind}".rstrip("/")
    checkout = Path(__file__).parents[3] / inside
    if checkout.is_dir():
        found = sorted(checkout.glob("*.toml"))
    else:
        installed = importlib.metadata.files("sixfold") or []
        found = [
            Path(str(f.locate())) for f in installed if f.match(f"share/sixfold/{inside}/*.toml")
        ]
    return {path.stem: path for path in [*found, *sorted(Path(inside).glob("*.toml"))]}


def find_recipe(path_or_name: str, kind: str = "") -> Path:
    """File of a recipe that is given by path or name. `kind`: as in `shipped_recipes`.

    Raises:
        UserError: if there is none.
    """
    path = Path(path_or_name).expanduser()
    if path.suffix == ".toml" or path.name != path_or_name or path.is_file():
        return path
    shipped = shipped_recipes(kind)
    if path_or_name in shipped:
        return shipped[path_or_name]
    if path.exists():
        return path  # a folder or a device: reading it raises an error with the reason
    known = ", ".join(sorted(shipped))
    hint = nearest(path_or_name, list(shipped))
    raise UserError(
        f"no recipe named '{path_or_name}'.{hint} Shipped: {known}; or give the path of a .toml"
        " file"
    )


def read_recipe_file(path: Path) -> str:
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; a recipe is a .toml file")
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file; a recipe is a .toml file")
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise UserError(f"recipe not found: {path}") from error
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise UserError(f"{path} is larger than 1 MiB; a recipe is a short TOML file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not a UTF-8 TOML file (byte {error.start} is not text)"
        ) from error
    if "\0" in text:
        raise UserError(
            f"{path} is not a UTF-8 TOML file (it holds a zero byte: binary, or UTF-16)"
        )
    return text
