"""Pages of the templates beside this module: self-contained HTML, which loads nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.base.text import shown

if TYPE_CHECKING:
    from jinja2 import Environment

# read now, so that a checkout may change while a run trains
_TEMPLATES = {
    file.name: file.read_text(encoding="utf-8")
    for file in (Path(__file__).parent / "templates").iterdir()
}


def render(template: str, **values: Any) -> str:
    """The page of a template. Texts are escaped, and shown without secrets; what a template calls
    safe is a drawing of this package."""
    return _environment().get_template(template).render(values) + "\n"


@cache
def _environment() -> Environment:
    import jinja2  # takes 50 ms, which only a page should cost

    def finalize(value: Any) -> Any:
        is_text = isinstance(value, str) and not hasattr(value, "__html__")
        return shown(value) if is_text else value

    return jinja2.Environment(
        loader=jinja2.DictLoader(_TEMPLATES),
        autoescape=True,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
