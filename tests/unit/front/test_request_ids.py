from itertools import islice, pairwise

from gateway.core.front.handler import request_ids


def test_ids_are_24_hex_digits_and_never_the_same() -> None:
    ids = list(islice(request_ids(), 1000))
    assert all(len(each) == 24 and int(each, 16) >= 0 for each in ids)
    assert len(set(ids)) == 1000


def test_no_id_reveals_the_next_one() -> None:
    ids = [int(each, 16) for each in islice(request_ids(), 2000)]
    for bit in range(96):
        changed = sum((one ^ other) >> bit & 1 for one, other in pairwise(ids))
        assert 700 < changed < 1300  # 1000 expected; 13 standard deviations


def test_each_gateway_has_its_own() -> None:
    assert next(request_ids()) != next(request_ids())
