"""The configurations of the reload row: valid, as large as they say, and different from each other."""

from gateway.config.file import parse
from gateway.features.operate.reload import differences
from tests.bench.bounds.reload import BACKENDS, KEYS, sections


def test_both_configurations_have_the_size_of_the_row_and_need_no_restart() -> None:
    old, new = (parse(sections(8000, changed=changed)) for changed in (False, True))
    for each in (old, new):
        assert (len(each.backends), len(each.auth.keys)) == (BACKENDS, KEYS)
        assert each.auth.keys[0].name == "key-0"
    found = differences(old, new)
    assert all(each.applies for each in found)
    changed = {each.path.partition(".")[0] for each in found}
    assert changed >= {"backends", "auth", "routing", "admission", "embeddings", "health", "upstream", "models"}
