"""Draw the README's picture from a real run: `make picture`."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from tacit.cli import show
from tacit.cli.data import data_inspect

TARGET = Path(__file__).parent / "images" / "inspect.svg"


def main() -> None:
    show.out = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    data_inspect("clinic-demo")
    drawing = show.out.export_svg(title="tacit data inspect clinic-demo")
    # The reader's own monospace font will do; a picture should not fetch one from elsewhere.
    TARGET.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL))


if __name__ == "__main__":
    main()
