"""The tool that breaks the engine, as far as that takes no compiler."""

import re

from break_engine import BREAKS, ROOT, SOURCES


def test_the_places_to_break_are_there():
    for one in BREAKS:
        text = (ROOT / SOURCES / one.file).read_text()
        assert text.count(one.code) == 1, one.name
        assert one.code != one.broken, one.name
        assert re.fullmatch(r"|[0-9a-f]{8}", one.mended), one.name
