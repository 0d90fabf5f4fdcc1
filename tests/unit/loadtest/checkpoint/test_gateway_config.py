"""What a gateway was started with."""

from pathlib import Path

from loadtest.checkpoint.gateway_config import effective

_FILE = """
backends:
  - {url: "http://a:8000", name: a, api_key: "${BACKEND_KEY}"}
auth: {keys: [{name: team, key: "${TEAM_KEY:-t0p}"}], cache_salt_secret: salty}
"""


def test_the_configuration_is_read_as_the_gateway_reads_it_and_its_secrets_are_not_told(tmp_path: Path) -> None:
    (tmp_path / "gw.yaml").write_text(_FILE)
    words = ["python", "gateway", "serve", "-c", "gw.yaml"]
    found = effective(words, tmp_path, {"BACKEND_KEY": "s3cr3t"})
    assert found["backends"][0]["name"] == "a"
    assert found["backends"][0]["api_key"] == "***"
    assert found["auth"]["keys"][0]["key"] == "***"
    assert found["routing"]["policy"] == "prefix"
    for secret in ("s3cr3t", "t0p", "salty"):
        assert secret not in str(found)


def test_backends_of_the_command_line_stand_for_a_file(tmp_path: Path) -> None:
    words = ["gateway", "serve", "--backend", "http://a:8000", "--backend=http://b:8000"]
    found = effective(words, tmp_path, {})
    assert [backend["name"] for backend in found["backends"]] == ["a:8000", "b:8000"]


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "gw.yaml").write_text(_FILE)
    assert "BACKEND_KEY is not set" in effective(["gateway", "serve", "-c", "gw.yaml"], tmp_path, {})
    assert "gone.yaml" in effective(["gateway", "serve", "--config=gone.yaml"], tmp_path, {})
    assert effective(["nginx"], tmp_path, {}) == "its command is not `gateway serve`"
