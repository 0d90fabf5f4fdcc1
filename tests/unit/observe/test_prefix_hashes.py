from gateway._native import prefix_keys
from gateway.core.observe.log import PrefixHashes
from gateway.core.request import Demand
from gateway.core.routing.prompt_blocks import seed


def asked(*pieces: bytes) -> Demand:
    keys, edges, _ = prefix_keys(list(pieces), seed("m"))
    return Demand("m", keys=keys, edges=edges, prompt_size=sum(map(len, pieces)))


def test_prompts_that_begin_alike_share_hashes_up_to_where_they_part() -> None:
    hashes = PrefixHashes(b"secret")
    one, other = (hashes.of(asked(b"s" * 1000, last))["hashes"] for last in (b"one", b"other"))
    assert one[:4] == other[:4]
    assert one[4] != other[4]


def test_sizes_are_included() -> None:
    found = PrefixHashes(b"secret").of(asked(b"s" * 300, b"x"))
    assert (found["bytes"], list(found["ends"])) == (301, [256, 300, 301])
    assert [len(each) for each in found["hashes"]] == [16, 16, 16]


def test_another_secret_makes_other_hashes_and_none_is_the_key_itself() -> None:
    ask = asked(b"s" * 300)
    first, same, other = (PrefixHashes(secret).of(ask)["hashes"] for secret in (b"a", b"a", b"b"))
    assert first == same
    assert not set(first) & set(other)
    assert not {f"{key:016x}" for key in ask.keys} & set(first)
    assert not {key.to_bytes(8, "little").hex() for key in ask.keys} & set(first)
