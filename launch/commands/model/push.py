"""The flags of `python -m launch export` that upload the folder to a hub."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from launch.base.errors import ConfigError
from launch.base.text import size
from launch.hub import names, upload
from launch.hub.names import HubName

FOLDER = "folder"  # value of --to: the model's own, pushed as it is


def push(
    folder: Path, base: str, named: Mapping[str, str], to: HubName, arguments: Namespace
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


def repository(arguments: Namespace) -> HubName | None:
    """The repository of --push. Raises ConfigError for flags that need it."""
    name = names.parse(arguments.push, is_data=False) if arguments.push else None
    if name and str(name) != name.repo:
        raise ConfigError(f"--push {name}: expected OWNER/NAME alone")
    flags = {
        "--public": arguments.public,
        "--dry-run": arguments.dry_run,
        f"--to {FOLDER}": arguments.to == FOLDER,
    }
    for flag in (flag for flag, is_typed in flags.items() if is_typed and not name):
        raise ConfigError(f"{flag}: expected --push OWNER/NAME beside it")
    return name
