"""`python -m launch download`: a model or a data set of a hub, into the workspace; and the flags of
`python -m launch export` that upload a folder to a hub."""

import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from launch.base.errors import LaunchError
from launch.base.text import shown, size
from launch.base.workspace import Workspace
from launch.commands import recipe_arguments
from launch.hub import download, names, upload

FLAGS = {
    "name": {
        "nargs": "+",
        "help": "OWNER/NAME[@REVISION] of a model, OWNER/NAME/FILE.gguf of one file,"
        " hf:OWNER/NAME[/CONFIG][:SPLIT][@REVISION] of data",
    }
}
FOLDER = "folder"  # value of export's --to: the model's own, pushed as it is


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


def push(
    folder: Path, base: str, named: Mapping[str, str], to: names.HubName, arguments: Namespace
) -> None:
    """Show the files of an exported folder, and upload them unless it is a dry run. `named`: names
    in the place of paths, beside that of the base."""
    contents, is_public = upload.leaving(folder, base, named), arguments.public
    print(f"{folder.name} to {to} ({'public' if is_public else 'private'}):")
    for name, content in contents.items():
        count = len(content) if isinstance(content, bytes) else content.stat().st_size
        print(f"  {name}  {size(count)}")
    if arguments.dry_run:
        print("nothing was sent: --dry-run")
    else:
        print(f"pushed: {upload.push(to, is_public, contents)}")


def repository(arguments: Namespace) -> names.HubName | None:
    """The repository of --push. Raises ConfigError for flags that need it."""
    name = names.parse(arguments.push, is_data=False) if arguments.push else None
    flags = {
        "--public": arguments.public,
        "--dry-run": arguments.dry_run,
        f"--to {FOLDER}": arguments.to == FOLDER,
    }
    recipe_arguments.refuse(
        (name and str(name) != name.repo, f"--push {name}: expected OWNER/NAME alone"),
        *(
            (is_typed and not name, f"{flag}: expected --push OWNER/NAME beside it")
            for flag, is_typed in flags.items()
        ),
    )
    return name
