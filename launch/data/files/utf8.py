"""Decode the lines of data files; an error names the byte that is not UTF-8."""

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from pathlib import Path

from launch.base.errors import DataError
from launch.data.files import shards

CHUNK_BYTES = 1 << 20


def decoded(place: object, raw: bytes, is_first: bool) -> str | DataError:
    """The text of a line, without the byte order mark of the first line; an error for bytes that
    are not UTF-8."""
    start = len(BOM_UTF8) if is_first and raw.startswith(BOM_UTF8) else 0
    try:
        return raw[start:].decode()
    except UnicodeDecodeError as error:
        return _not_utf8(f"{place}:{start + error.start}", raw)


def wrong_byte(path: Path) -> DataError:
    """The error for the first byte that is not UTF-8, in a file where one is not."""
    decoder = getincrementaldecoder("utf-8")()
    line, offset = 1, 0
    with shards.opened(path) as file:
        while True:
            raw = file.readline(CHUNK_BYTES)  # a line may be the whole file
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                return _not_utf8(f"{path}:{line}:{offset - pending + error.start}", raw)
            line, offset = (line + 1, 0) if raw.endswith(b"\n") else (line, offset + len(raw))


def _not_utf8(wrong: str, raw: bytes) -> DataError:
    if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return DataError(
            f"{wrong}: is UTF-16; convert the file to UTF-8, e.g. iconv -f UTF-16 -t UTF-8"
        )
    if raw.startswith(b"\x1f\x8b"):
        return DataError(f"{wrong}: is compressed with gzip; unpack the file with gunzip")
    return DataError(
        f"{wrong}: this byte is not UTF-8; convert the file to UTF-8, e.g. iconv -f GB18030 -t"
        " UTF-8"
    )
