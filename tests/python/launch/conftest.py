"""The launcher behind both of its doors."""

from __future__ import annotations

import pytest
from launching import doors


@pytest.fixture(params=["python", "binary"])
def launch(request: pytest.FixtureRequest) -> list[str]:
    """The words before the launcher's arguments."""
    if request.param not in doors():
        pytest.skip("the binary is not built (cargo build -p unisono-launch)")
    return doors()[request.param]
