"""What the oracle found, once for each model."""

from __future__ import annotations

import pytest

from tests.parity.cases import DETAIL, DETAILS, MODELS, Ask, Case, Expected, ask_oracle


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What the oracle found for the model of a case."""
    found: dict[tuple[str, int], Expected] = {}

    def get(case: Case) -> Expected:
        key = case.model, case.batch
        if key not in found:
            folder, choice = tmp_path_factory.mktemp(case.model), MODELS[case.model]
            detail = DETAILS.get(case.model, DETAIL) if case.detail is not None else None
            found[key] = ask_oracle(folder, choice, case.batch, detail)
        return found[key]

    return get
