"""Progress of long work, as a line that people read and that the launcher's bar parses."""

import re
from dataclasses import dataclass

_ROWS_LINE = re.compile(
    r"tokenising (?P<name>.+): (?P<rows>[\d,]+)(?: of (?P<total>[\d,]+))? rows\b"
)


def eta(seconds: float) -> str:
    """The time left, as h:mm:ss, or as days and h:mm:ss."""
    minutes, seconds_left = divmod(round(seconds), 60)
    days, hours = divmod(minutes // 60, 24)
    of_days = f"{days:,} day{'' if days == 1 else 's'} " if days else ""
    return f"ETA {of_days}{hours}:{minutes % 60:02}:{seconds_left:02}"


@dataclass(frozen=True)
class RowProgress:
    """Rows of a file that are tokenised so far."""

    name: str
    rows: int
    total: int | None  # None: not counted

    def line(self, seconds: float) -> str:
        """The line of text. `seconds` have passed since the first row."""
        if not self.total or not self.rows:
            return f"tokenising {self.name}: {self.rows:,} rows"
        left_s = seconds * max(self.total - self.rows, 0) / self.rows
        return f"tokenising {self.name}: {self.rows:,} of {self.total:,} rows, {eta(left_s)}"

    @classmethod
    def read(cls, line: str) -> "RowProgress | None":
        """The progress that a line reports; None for a line of another kind."""
        if not (match := _ROWS_LINE.fullmatch(line.partition(", ETA")[0])):
            return None
        rows, total = (
            int((number or "0").replace(",", "")) for number in match.group("rows", "total")
        )
        return cls(match["name"], rows, total or None)
