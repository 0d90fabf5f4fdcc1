"""Numbers that clients give are whole, and spelled in one way."""

from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.features.batches.documents import BatchesPage, Expiry, FilesPage, checked


@pytest.mark.parametrize("seconds", [3600, "3600", "2592000"])
def test_a_lifetime_is_a_number_or_its_digits(seconds: Any) -> None:
    assert checked(Expiry, {"anchor": "created_at", "seconds": seconds}).seconds == int(seconds)


@pytest.mark.parametrize("seconds", [3600.0, "3600.0", " 3600", "+3600", "3_600", "٣٦٠٠", True, None, "", 3599])
def test_no_other_value_is_a_lifetime(seconds: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked(Expiry, {"anchor": "created_at", "seconds": seconds})
    assert refused.value.param == "seconds"


@pytest.mark.parametrize("page", [BatchesPage, FilesPage])
@pytest.mark.parametrize("limit", ["0", "10001", "5.0", " 5", "+5", "0_5", "", "1" * 5000])
def test_no_other_value_is_a_limit(page: type[BatchesPage | FilesPage], limit: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked(page, {"limit": limit})
    assert refused.value.param == "limit"
