"""`compress recipes`: the recipes that come with the package."""

from pathlib import Path
from typing import Annotated

import typer

recipes_app = typer.Typer(help="Recipes that come with the package.", no_args_is_help=True)


@recipes_app.command("list")
def recipes_list() -> None:
    """Names of the shipped recipes, with what each does."""
    from compress.recipe import shipped_recipes

    for name, text in shipped_recipes().items():
        print(f"{name:<16} {text.splitlines()[0].removeprefix('# ')}")


@recipes_app.command("show")
def recipes_show(name: str) -> None:
    """Print a recipe."""
    from compress.lookup import lookup
    from compress.recipe import shipped_recipes

    print(lookup(shipped_recipes(), name, "recipe"), end="")


@recipes_app.command("copy")
def recipes_copy(
    name: str,
    destination: Annotated[Path | None, typer.Argument(help="File; NAME.yaml by default.")] = None,
) -> None:
    """Copy a recipe to a file, to edit it."""
    from compress.lookup import lookup
    from compress.recipe import shipped_recipes

    text = lookup(shipped_recipes(), name, "recipe")
    file = destination or Path(f"{name}.yaml")
    with file.open("x", encoding="utf-8") as stream:  # never overwrites
        stream.write(text)
    print(file)
