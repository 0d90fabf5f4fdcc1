"""How the build reads where this machine gets its packages from."""

from pathlib import Path

import pytest

from tests.image import host


def test_the_release_is_the_code_name() -> None:
    assert host.release_of('ID=debian\nVERSION_CODENAME=bookworm\nNAME="Debian"\n') == "bookworm"
    assert host.release_of('VERSION_CODENAME="noble"\n') == "noble"


def test_a_system_without_a_release_is_refused() -> None:
    with pytest.raises(host.UnknownHost, match="VERSION_CODENAME"):
        host.release_of("ID=arch\n")


def test_sources_of_the_release_are_taken_and_others_left(tmp_path: Path) -> None:
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    ours = folder / "debian.sources"
    ours.write_text("Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n")
    (folder / "other.list").write_text("# deb http://mirror.example bookworm main\ndeb http://other.example any main\n")
    (folder / "off.sources.disabled").write_text(ours.read_text())
    classic = tmp_path / "sources.list"
    classic.write_text("deb http://mirror.example/debian bookworm main\n")
    assert host.apt_sources(tmp_path, "bookworm") == [classic, ours]


def test_a_machine_without_sources_of_the_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(host.UnknownHost, match="bookworm"):
        host.apt_sources(tmp_path, "bookworm")


def test_proxies_and_certificates_of_apt_are_kept() -> None:
    proxy = 'Acquire::http::Proxy "http://proxy.example:3128";'
    assert host.apt_options(f'APT "";\n{proxy}\nAcquire::https::CaInfo "";\nAcquire::Retries "3";\n') == [proxy]


def test_pips_environment_wins_over_commands_and_those_over_all() -> None:
    listing = "\n".join(
        ["install.timeout='20'", ":env:.timeout='30'", "global.timeout='10'", "global.cert='/a'", "install.cert='/b'"]
    )
    assert host.pip_settings(listing) == {"timeout": "30", "cert": "/b"}


def test_pip_settings_that_only_fit_this_machine_are_left_out() -> None:
    assert host.pip_settings("global.user='true'\nglobal.index-url='https://a.example/simple'\nother.x='1'") == {
        "index-url": "https://a.example/simple"
    }


def test_several_values_of_a_pip_setting_are_one_line() -> None:
    assert host.pip_conf({"find-links": "\n/a\n/b"}) == "[global]\nfind-links = /a /b\n"


def test_local_files_are_lent_and_an_index_with_what_lies_beside_it(tmp_path: Path) -> None:
    index, wheels = tmp_path / "index" / "simple", tmp_path / "wheels"
    index.mkdir(parents=True)
    wheels.mkdir()
    settings = {
        "extra-index-url": f"https://a.example/simple file://{index}",
        "find-links": f"{wheels} {tmp_path}/missing",
        "timeout": "30",
    }
    assert host.local_paths(settings) == [index.parent, wheels]
