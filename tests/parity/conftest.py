"""What the oracle found, once for each model."""

from __future__ import annotations

import pytest

from tests.parity.cases import Ask, Case, Expected, ask_oracle


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What the oracle found for the model and the data of a case."""
    found: dict[tuple[object, ...], Expected] = {}

    def get(case: Case) -> Expected:
        key = case.model, case.batch, case.pictures, case.balance
        if key not in found:
            found[key] = ask_oracle(tmp_path_factory.mktemp(case.model), case)
        return found[key]

    return get
