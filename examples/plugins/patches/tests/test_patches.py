"""The tests that Quire makes from the declarations, in fresh interpreters."""

import pytest

from quire.patch.testing import PatchCase, patch_cases


@pytest.mark.parametrize("case", patch_cases("quire-example-patches"), ids=str)
def test_patch(case: PatchCase) -> None:
    case.check()
