"""`python -m launch download`: a model or a data set that is named on a hub, into the workspace."""

import sys
from argparse import Namespace

from launch.base.errors import LaunchError
from launch.base.text import shown
from launch.base.workspace import Workspace
from launch.commands import recipe_arguments
from launch.hub import download, names

FLAGS = {
    "name": {
        "nargs": "+",
        "help": "OWNER/NAME[@REVISION] of a model, OWNER/NAME/FILE.gguf of one file,"
        " hf:OWNER/NAME[/CONFIG][:SPLIT][@REVISION] of data",
    }
}


def main(arguments: Namespace) -> int:
    """Download each name, or what is new of it since; show the keys that take it."""
    exit_code = 0
    for text in arguments.name:
        try:
            _download(text)
        except LaunchError as error:  # the other names are fetched all the same
            print(f"error: {shown(str(error))}", file=sys.stderr)
            exit_code = exit_code or error.exit_code
    return exit_code


def _download(text: str) -> None:
    root, say = Workspace.here().root, recipe_arguments.say
    name = names.parse(text, is_data=text.startswith(names.PREFIX))
    folder = download.folder_of(name, root, say, refresh=True)
    key = "data.train_file" if name.is_data else "model.path"
    say(f"{folder}" if str(name).endswith(".gguf") else f"{folder}\n--{key}={name}")
