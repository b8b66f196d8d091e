"""The section `data` of a recipe."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from launch.schema.section import Section, affects, as_tuple

A_PATH, A_LIST = "a path", "a list of sources"  # the forms of train_file


class ColumnNames(Section):
    """The columns of a source that make a sample."""

    prompt: str | None = None
    response: str | None = None
    text: str | None = None
    messages: str | None = None

    def _faults(self) -> Sequence[tuple[object, str]]:
        named = [name for name in type(self).model_fields if getattr(self, name) is not None]
        return [
            (
                named not in (["prompt", "response"], ["text"], ["messages"]),
                f"found {', '.join(named) or 'none'}, expected prompt and response, or text, or"
                " messages; leave columns out to have them found by name",
            )
        ]


class DataSource(Section):
    """A part of the training rows: files of one format."""

    path: str = Field(min_length=1)
    # number of times that an epoch trains each row; 0.5: half of the rows
    weight: float = Field(default=1.0, gt=0, le=100, allow_inf_nan=False)
    columns: ColumnNames | None = None

    @model_validator(mode="before")
    @classmethod
    def of_a_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


def short_names(paths: Iterable[str | Path]) -> dict[str, str]:
    """The last parts of each path, as few as tell it from the others."""
    parts = {str(path): Path(path).parts for path in paths}
    names = {}
    for path, own in parts.items():
        others = [other for other in parts.values() if other != own]
        count = next(
            (n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others)),
            len(own),
        )
        names[path] = str(Path(*own[-count:]))
    return names


def _form(value: Any) -> str:
    return A_LIST if isinstance(value, list | tuple) else A_PATH


class DataSection(Section):
    """The rows and the columns to read. Columns are found by name unless they are named here."""

    train_file: Annotated[
        Annotated[str, Tag(A_PATH)] | Annotated[tuple[DataSource, ...], Tag(A_LIST)],
        Discriminator(_form),
        affects("source"),
    ] = Field(
        description="Training rows: a file, a folder of shards, a pattern of files, a data set on a"
        " hub (hf:OWNER/NAME), or a list of {path, weight, columns}."
    )
    validation_file: Annotated[str | None, affects("source")] = Field(
        default=None,
        description="Held-out rows: a file, a folder of shards, a pattern of files, or a data set"
        " on a hub.",
    )
    validation_size: Annotated[int | float | None, affects("rows")] = Field(
        default=None,
        description="Hold rows of train_file out instead: a number of rows, or a share between 0"
        " and 1.",
    )
    prompt_column: Annotated[str | None, affects("rows")] = Field(
        default=None, description="Column of the prompt. null: found by name."
    )
    response_column: Annotated[str | None, affects("rows")] = Field(
        default=None, description="Column of the response. null: found by name."
    )
    text_column: Annotated[str | None, affects("rows")] = Field(
        default=None, description="Column of plain text. null: found by name."
    )
    messages_column: Annotated[str | None, affects("rows")] = Field(
        default=None, description="Column of conversations. null: found by name."
    )
    ignore_columns: Annotated[tuple[str, ...], BeforeValidator(as_tuple), affects("rows")] = Field(
        default=(),
        description="Columns, or keys of messages, whose content is left out on purpose.",
    )
    max_length: Annotated[int, affects("rows", "memory", "step_time")] = Field(
        default=512,
        ge=8,
        le=1 << 20,
        description="Most tokens of a sequence (decoder), or of each side (T5); longer rows "
        "are truncated in SFT (see truncation_side) and become several in pretraining.",
    )
    truncation_side: Annotated[Literal["right", "left"], affects("rows")] = Field(
        default="right",
        description="The side from which SFT rows longer than max_length lose tokens; left keeps"
        " the end of the last answer. Of a T5, the side of its input; targets lose their end.",
    )
    max_train_samples: Annotated[PositiveInt | None, affects("rows")] = Field(
        default=None, description="Train on at most this many rows."
    )
    max_validation_samples: Annotated[PositiveInt | None, affects("rows")] = Field(
        default=None, description="Evaluate on at most this many rows."
    )
    max_bad_rows: Annotated[int, affects("rows")] = Field(
        default=0,
        ge=0,
        description="Unreadable rows of the training data, and of the held-out data, that are left"
        " out and counted; one more is an error.",
    )
    text_rows: Annotated[Literal["lines", "paragraphs", "file"], affects("rows")] = Field(
        default="lines",
        description="The rows of a .txt file: its lines, its paragraphs (between blank lines), or"
        " the file as one text.",
    )
    packing: Annotated[bool, affects("rows", "memory", "step_time")] = Field(
        default=False,
        description="Put several rows into one sequence of max_length, each with its own "
        "positions and attention.",
    )
    streaming: Annotated[bool, affects("rows", "memory", "step_time")] = Field(
        default=False,
        description="Tokenise while training and store few tokens; needs task pretrain, packing"
        " and max_steps.",
    )
    shuffle_buffer_mib: Annotated[float | None, affects("rows")] = Field(
        default=None,
        gt=0,
        le=65_536,
        allow_inf_nan=False,
        description="Buffer in which a stream is shuffled, in MiB. null: 16.",
    )
    group_by_length: Annotated[bool, affects("rows")] = Field(
        default=False,
        description="Fill an optimizer step with rows of about one length; every row once an "
        "epoch.",
    )
    batch_by_tokens: Annotated[bool | None, affects("memory", "step_time", "planned")] = Field(
        default=None,
        description="Split a step into micro-batches of rows of about one length, with at most "
        "as many padded tokens as per_device_train_batch_size of the longest rows "
        "have. null: planned, where it is faster.",
    )

    @property
    def holds_out(self) -> bool:
        """True if there are rows to evaluate on."""
        return self.validation_file is not None or self.validation_size is not None

    @property
    def is_mixed(self) -> bool:
        """True if train_file is a list of sources, whose rows are counted before the plan."""
        return not isinstance(self.train_file, str)

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The sources of the training rows; a single path is one with weight 1."""
        if isinstance(self.train_file, str):
            return (DataSource(path=self.train_file),)
        return self.train_file

    @property
    def source_names(self) -> tuple[str, ...]:
        """A name of each source, with its weight, for people."""
        names = short_names(source.path for source in self.sources)
        return tuple(
            names[source.path] + ("" if source.weight == 1 else f" x {source.weight:g}")
            for source in self.sources
        )

    @property
    def train_names(self) -> str:
        """The sources, for people."""
        return ", ".join(self.source_names)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The sources of the training rows, and the file of held-out rows."""
        paths = [source.path for source in self.sources]
        return tuple(map(Path, [*paths, *filter(None, [self.validation_file])]))

    @property
    def stream_unit_bytes(self) -> int:
        """Bytes of a unit of a stream. Four units are shuffled together."""
        return max(int((self.shuffle_buffer_mib or 16) * (1 << 20)) // 4, 1)

    @field_validator("validation_size", mode="before")
    @classmethod
    def rows_or_a_share(cls, value: Any) -> Any:
        is_rows = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value is None or is_rows or (isinstance(value, float) and 0 < value < 1):
            return value
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        is_whole = isinstance(value, float) and value > 1 and value.is_integer()
        advice = f"; write {value:.0f}" if is_whole else ""
        raise ValueError(
            f"found {shown}, expected a number of rows (100) or a share between 0 and 1 (0.05)"
            f"{advice}"
        )

    def _faults(self) -> Sequence[tuple[object, str]]:
        paths = [source.path for source in self.sources]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        return [
            (not paths, "train_file is an empty list; name at least one {path: FILE}"),
            (
                twice is not None,
                f"train_file names {twice} twice; write it once, with a weight",
            ),
            (
                self.is_mixed and self.streaming,
                "train_file is a list, which streaming does not take: a stream takes the shards of"
                " one source",
            ),
            (
                self.is_mixed and self.max_train_samples is not None,
                "train_file is a list, which max_train_samples does not take: it takes the first"
                " rows, which are of the first source; lower the weights",
            ),
            (
                self.validation_file is not None and self.validation_size is not None,
                "validation_file and validation_size both say which rows are held out; leave one"
                " of the two out, or set it to null",
            ),
            (
                self.shuffle_buffer_mib is not None and not self.streaming,
                "shuffle_buffer_mib is for data.streaming: true; other rows are shuffled over all"
                " of them",
            ),
            *(
                (
                    self.packing and getattr(self, key),
                    f"packing leaves nothing for {key} to do; set one of the two to false",
                )
                for key in ("group_by_length", "batch_by_tokens")
            ),
        ]
