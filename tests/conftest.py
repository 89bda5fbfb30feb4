"""Options and fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of real models and tokenizers"
    )


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of real test data; tests that need it are skipped where it is absent."""
    folder: Path = request.config.getoption("--data")
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder} (pass --data DIR)")
    return folder
