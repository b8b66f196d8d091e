"""The files behind data.train_file: one, or the shards of a corpus; the ways to open
them, and facts of them."""

import contextlib
import glob
import hashlib
import io
import itertools
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from launch.base import files, processes
from launch.base.errors import DataError, ResourceError
from launch.base.text import cause, size
from launch.data.files import folders

T = TypeVar("T")
END = object()  # default of next() at the end of an iterator
_MAX_BATCH_BYTES = 2 << 30  # limit for a batch of rows, with its Python objects
BATCH_BYTES = 64 << 20  # rows that are Python objects at the same time, by the size of their file
TABLES = ("parquet", "arrow")  # types that have a schema
MAX_ROW_BYTES = 64 << 20  # longest line, or member of a tar; largest mean row of a parquet file
# WebDataset: the key of a sample, and what of it this is
_MEMBER = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_TEXT_MEMBERS, _JSON_MEMBER = ("txt", "text"), "json"
_ARROW_FILE = b"ARROW1"  # the first bytes of the random access format; the stream format has none
UNIT_BYTES = 16 << 20  # 5 to 10 s of one CPU
STREAM_PROCESSES = 2  # processes that tokenise while the ranks train
# Bytes at each end of a shard that stand for its content, where reading all of it takes too long
ENDS_BYTES = 1 << 20
_MOST_UNITS = 2048  # limit for a corpus: each unit of a cache is a file that is mapped
_RACY_S = 2.0  # a file this young may change once more within a tick of its time stamps
_NO_THREAD = "Resource temporarily unavailable"  # EAGAIN of pthread_create(3)
_MEMO_BYTES = 16 << 20  # a single smaller file is read again each time


# ---- which files
# ---------------------------------------------------------------------------


def list_shards(path: Path) -> tuple[Path, ...]:
    """The file itself, or the shards of a folder or of a pattern, in the order of their names.

    Raises DataError where there is none."""
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError:  # a name that is too long: opening it will say so
        return (path,)
    if is_folder:
        return folders.data_files(path)
    if not is_there and glob.has_magic(str(path)):
        fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
        matches = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
        matching = sorted(
            match
            for match in matches
            if match.name[0] not in "._"
            and not any(part.startswith(".") for part in match.parts[fixed:])
            and match.is_file()
        )
        if not matching:
            raise DataError(f"{path}: no file matches this pattern")
        return tuple(matching)
    return (path,)


def opened(path: Path) -> BinaryIO:
    """The file's bytes, unpacked while they are read."""
    compression = folders.COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return path.open("rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression=compression), 1 << 18)


def within_memory(path: Path, items: Iterator[T]) -> Iterator[T]:
    """Batches of rows as they are read. Raises DataError for one that takes far more memory than
    rows do: a small file may hold a long text many times."""
    for number in itertools.count(1):
        try:
            with processes.memory_limit(_MAX_BATCH_BYTES):
                item = next(items, END)
        except MemoryError as error:
            raise DataError(
                f"{path}: batch {number:,} of its rows takes more memory than the"
                f" {size(_MAX_BATCH_BYTES)} that reading may take; is it damaged? If it is meant"
                " so, write shorter rows, smaller row groups or smaller batches"
            ) from error
        if item is END:
            return
        yield item  # pyright: ignore[reportReturnType]


class _RowGroup:
    """A row group of a parquet file."""

    def __init__(self, file: Any, number: int) -> None:
        self._file, self._number, self._facts = file, number, file.metadata.row_group(number)
        self.num_rows, self.num_bytes = self._facts.num_rows, self._facts.total_byte_size

    def stored_bytes(self) -> int:
        """Its bytes in the file."""
        columns = map(self._facts.column, range(self._facts.num_columns))
        return sum(column.total_compressed_size for column in columns)

    def parts(self, columns: list[str], num_rows: int) -> Iterator[Any]:
        """These columns, so many rows at a time."""
        return self._file.iter_batches(num_rows, row_groups=[self._number], columns=columns)


class _Batch:
    """A record batch of an Arrow file, with what a row group has."""

    def __init__(self, batch: Any) -> None:
        self._batch, self.num_rows, self.num_bytes = batch, batch.num_rows, batch.nbytes

    def stored_bytes(self) -> int:
        return self.num_bytes

    def parts(self, columns: list[str], num_rows: int) -> Iterator[Any]:
        self._batch.validate(full=True)  # wrong offsets would end the process
        rows = self._batch.select(columns)
        return (rows.slice(begin, num_rows) for begin in range(0, self.num_rows, num_rows))


@contextlib.contextmanager
def opened_table(
    path: Path, file_type: str, fault: str = ""
) -> Iterator[tuple[Any, Iterator[_RowGroup | _Batch]]]:
    """(schema, groups of rows in their order) of a parquet file, or of an Arrow file, stream or
    random access, mapped into memory. Raises DataError for a file that is damaged, and says so, or
    names another `fault`."""
    import pyarrow as pa  # not at the top: a plan needs none of it

    try:
        with _opened_parquet(path) if file_type == "parquet" else _opened_arrow(path) as table:
            yield table
    except (pa.ArrowException, OSError, ValueError) as error:
        fault = fault or f"is cut, damaged or no {file_type} file"
        raise unreadable(path, fault, error) from error


@contextlib.contextmanager
def _opened_parquet(path: Path) -> Iterator[tuple[Any, Iterator[_RowGroup]]]:
    import pyarrow.parquet as pq

    # whole row groups are not buffered: one of pictures may be larger than memory
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        yield file.schema_arrow, map(partial(_RowGroup, file), range(file.num_row_groups))


@contextlib.contextmanager
def _opened_arrow(path: Path) -> Iterator[tuple[Any, Iterator[_Batch]]]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        is_stream = mapped.read(len(_ARROW_FILE)) != _ARROW_FILE
        mapped.seek(0)
        with pa.ipc.open_stream(mapped) if is_stream else pa.ipc.open_file(mapped) as reader:
            batches = (
                iter(reader)
                if is_stream
                else map(reader.get_batch, range(reader.num_record_batches))
            )
            yield reader.schema, map(_Batch, within_memory(path, batches))


def unreadable(path: Path, fault: str, error: Exception) -> DataError | ResourceError:
    """The error of a file that is cut or damaged, or of a thread that pyarrow may not start."""
    if _NO_THREAD in cause(error):
        return ResourceError(f"{path}: {fault} ({cause(error)}); {processes.limit_of_processes()}")
    return DataError(f"{path}: {fault} ({cause(error)}); write or copy it again")


def stored_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in list_shards(path))


def unit_bytes(*paths: Path) -> int:
    """Bytes of one unit (training/data/units.py) of these paths. A cache has at most as many files
    as can be mapped."""
    return max(UNIT_BYTES, -(-sum(map(stored_bytes, paths)) // _MOST_UNITS))


# ---- WebDataset
# ---------------------------------------------------------------------------


def tar_samples(path: Path) -> Iterator[tuple[str, dict[str, Any] | DataError]]:
    """(key, row) of a WebDataset shard, or why this sample is no row; those after it can be read
    all the same.

    Members of one key follow each other. The object of its .json is the row, the content of its
    .txt the row's text; of its other members the row has the names.
    Python's tarfile takes an archive that is cut for one that is at its end: here it is an
    error."""
    key = ""
    try:
        with tarfile.open(path, "r:") as archive:
            for key, members in itertools.groupby(_members(archive), itemgetter(0)):
                row = {part: _content(path, archive, part, member) for _, part, member in members}
                yield key, _tar_row(path, key, row)
            end = archive.offset
        with path.open("rb") as file:
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it has no end")
    except (tarfile.TarError, EOFError) as error:
        after = f" after sample {key}" if key else ""
        raise DataError(
            f"{path}: is cut, damaged or no tar file{after} ({error}); write or copy it again"
        ) from error


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """The files of an archive, each with the key of its sample, and what of it this is."""
    for member in archive:
        # its list, which no stub has, keeps each member that was read: a shard has a million
        archive.members = []  # type: ignore[attr-defined]
        matched = _MEMBER.match(member.name)
        if matched and member.isfile():
            yield matched[1], matched[2], member


def _content(path: Path, archive: tarfile.TarFile, part: str, member: tarfile.TarInfo) -> bytes:
    """The content of a file of text or JSON; of another its name is enough."""
    if part not in (*_TEXT_MEMBERS, _JSON_MEMBER):
        return b""
    if member.size > MAX_ROW_BYTES:
        raise DataError(
            f"{path}: {member.name} has {member.size:,} bytes, over {MAX_ROW_BYTES >> 20} MiB"
        )
    file = archive.extractfile(member)
    assert file is not None  # isfile()
    return file.read()


def _tar_row(path: Path, key: str, members: dict[str, bytes]) -> dict[str, Any] | DataError:
    texts = [part for part in _TEXT_MEMBERS if part in members]
    if not texts and _JSON_MEMBER not in members:
        return DataError(
            f"{path}:{key}: has {', '.join(sorted(members))}, but neither a .txt nor a .json"
        )
    row: dict[str, Any] = {}
    others = {
        part: {"member": f"{key}.{part}"}
        for part in members
        if part not in (*_TEXT_MEMBERS, _JSON_MEMBER)
    }
    if _JSON_MEMBER in members:
        try:
            row = json.loads(members[_JSON_MEMBER])
        except (ValueError, RecursionError) as error:
            return DataError(
                f"{path}:{key}.json: cannot be read as JSON ({error}); mend or remove the sample"
            )
        if not isinstance(row, dict):
            return DataError(f"{path}:{key}.json: found {type(row).__name__}, expected an object")
    for part in texts:
        try:
            row["text"] = members[part].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return DataError(
                f"{path}:{key}.{part}:{error.start}: this byte is not UTF-8; convert the text to"
                " UTF-8"
            )
    return others | row


# ---- facts of a file
# ---------------------------------------------------------------------------


class FileFacts:
    """Facts read of files before: their hashes, columns, rows. They hold while size, times and
    inode stay the same.

    Without a file nothing is remembered."""

    def __init__(self, file: Path | None = None, racy_s: float = _RACY_S) -> None:
        self._file, self._racy_s = file, racy_s
        self._is_new = False
        self._entries: dict[str, dict[str, Any]] = {}
        if file is not None:
            # missing, damaged, or of another version: read all again
            with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
                written = json.loads(files.regular_bytes(file))
                if written["sha256"] == _seal(written["entries"]):
                    self._entries = written["entries"]

    def get(self, path: Path, label: str, read: Callable[[], Any]) -> Any:
        """A fact of this file. `read` is called only if it is not remembered."""
        stamp, began = _stamp(path), time.time()
        entry = self._entries.get(str(path), {})
        if entry.get("stamp") != stamp:
            entry = {"stamp": stamp}
        if label in entry:
            return entry[label]
        value = read()
        if _stamp(path) == stamp and began - max(stamp[1:3]) / 1e9 > self._racy_s:
            self._entries[str(path)] = {**entry, label: value}
            self._is_new = True
        return value

    def keep(self) -> None:
        """Write the facts to their file, for later starts."""
        if self._file is not None and self._is_new:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(
                self._file,
                json.dumps({"sha256": _seal(self._entries), "entries": self._entries}),
            )
            self._is_new = False


def _seal(entries: Any) -> str:
    """A hash by which a damaged fact is found: one that is only of another value looks whole."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def fingerprint(path: Path, facts: FileFacts) -> str:
    """sha256 of a data file's bytes; of several shards, of their hashes in order, not names."""
    paths = list_shards(path)
    if len(paths) == 1 and paths[0].stat().st_size < _MEMO_BYTES:
        return files.sha256(paths[0])
    hashes = [facts.get(file, "sha256", partial(files.sha256, file)) for file in paths]
    facts.keep()
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def ends_fingerprint(path: Path) -> str:
    """Of a corpus that is streamed: sha256 of each shard's size and its first and last MiB, in
    order.

    A change that leaves these as they are is not seen."""
    digest = hashlib.sha256()
    for file in list_shards(path):
        size = file.stat().st_size
        with file.open("rb") as opened:
            digest.update(f"{size}\n".encode() + opened.read(ENDS_BYTES))
            opened.seek(max(size - ENDS_BYTES, 0))
            digest.update(opened.read(ENDS_BYTES))
    return digest.hexdigest()
