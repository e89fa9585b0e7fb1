"""Reading requirements files: what pip would understand, and a sentence for what it would not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echelon.environments.requirements import (
    ParsedDependencies,
    find_insecure_url_faults,
    read_requirements,
)


def parse(folder: Path, text: str, **more: str) -> ParsedDependencies:
    for name, content in {"requirements.txt": text, **more}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return read_requirements(folder / "requirements.txt", folder, {"TOKEN": "secret"})


def fault_texts(found: ParsedDependencies) -> str:
    return "\n".join(fault.what for fault in [*found.faults, *find_insecure_url_faults(found, ())])


def test_lines_are_parsed_as_by_pip(tmp_path: Path) -> None:
    found = parse(
        tmp_path,
        "# all of it\nnumpy>=1.24, <3  # why\n\ntorch \\\n  ==2.4 ; python_version > '3.8'\n"
        "a.b_c[x,y]~=1.0\nfoo==1 --hash=sha256:aa \\\n --hash=sha256:bb\n"
        "lib @ https://host/lib-1.whl#egg=lib\ngit+https://${TOKEN}@host/r.git@main#egg=r\n",
    )
    assert found.faults == []
    assert [(w.text, w.line_number) for w in found.requirements] == [
        ("numpy>=1.24, <3", 2),
        ("torch ==2.4 ; python_version > '3.8'", 4),
        ("a.b_c[x,y]~=1.0", 6),
        ("foo==1 --hash=sha256:aa --hash=sha256:bb", 7),
        ("lib @ https://host/lib-1.whl#egg=lib", 9),
        ("git+https://secret@host/r.git@main#egg=r", 10),
    ]
    assert [w.name for w in found.requirements] == ["numpy", "torch", "a-b-c", "foo", "lib", ""]
    assert found.variables == {"TOKEN"}


@pytest.mark.parametrize(
    "data",
    [
        "\ufeffsix\r\nrich\r\n".encode(),
        "six\nrich\n".encode("utf-16"),  # PowerShell's `pip freeze > requirements.txt`
    ],
)
def test_files_of_other_systems_are_read(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "requirements.txt").write_bytes(data)
    found = read_requirements(tmp_path / "requirements.txt", tmp_path, {})
    assert [w.text for w in found.requirements] == ["six", "rich"]


def test_includes_are_followed_from_the_including_file(tmp_path: Path) -> None:
    found = parse(
        tmp_path,
        "-r sub/base.txt\n-c limits.txt\n-rmore.txt\n--requirement=sub/last.txt\n",
        **{
            "sub/base.txt": "-r deeper.txt\nsix\n",
            "sub/deeper.txt": "rich\n",
            "sub/last.txt": "attrs\n",
            "limits.txt": "six<2\n",
            "more.txt": "idna\n",
        },
    )
    assert found.faults == []
    assert [w.text for w in found.requirements] == ["rich", "six", "idna", "attrs"]
    assert [w.text for w in found.constraints] == ["six<2"]
    assert [f.name for f in found.files] == [
        *("requirements.txt", "base.txt", "deeper.txt", "limits.txt", "more.txt", "last.txt"),
    ]


def test_including_a_file_twice_is_not_a_circle(tmp_path: Path) -> None:
    found = parse(tmp_path, "-r a.txt\n-r b.txt\n", **{"a.txt": "-r b.txt\n", "b.txt": "six\n"})
    assert found.faults == []


def test_options_are_collected(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    found = parse(
        tmp_path,
        "-i https://a/simple\n--extra-index-url=https://b/simple --pre\n-f wheels\n"
        "--find-links /srv/wheels\n--no-binary :all:\n--trusted-host c\nsix\n",
    )
    assert found.faults == []
    assert found.options == [
        ("--index-url", "https://a/simple"),
        ("--extra-index-url", "https://b/simple"),
        ("--pre", ""),
        ("--find-links", (tmp_path / "wheels").as_uri()),
        ("--find-links", "/srv/wheels"),
        ("--no-binary", ":all:"),
        ("--trusted-host", "c"),
    ]
    assert [w.text for w in found.requirements] == ["six"]


def test_a_local_project_is_never_installed_as_editable(tmp_path: Path) -> None:
    (tmp_path / "my lib").mkdir()
    (tmp_path / "a-1.whl").touch()
    found = parse(tmp_path, "-e './my lib[fast]'\n-e .\na-1.whl\n./my lib ; python_version > '3'\n")
    assert found.faults == []
    assert [w.text for w in found.requirements] == [
        *("./my lib[fast]", ".", "./a-1.whl", "./my lib ; python_version > '3'"),
    ]
    assert found.local_paths == [
        tmp_path / "my lib",
        tmp_path,
        tmp_path / "a-1.whl",
        tmp_path / "my lib",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("six\n\nnot a requirement!\n", "requirements.txt:3: 'not a requirement!' is not a"),
        ("six>>1\n", "requirements.txt:1: 'six>>1' is not a requirement"),
        ("six\n-r gone.txt\n", "requirements.txt:2: gone.txt is included, but does not exist"),
        ("-c gone.txt\n", "requirements.txt:1: gone.txt is included, but does not exist"),
        ("-r requirements.txt\n", "in a circle: requirements.txt → requirements.txt"),
        ("-r\n", "requirements.txt:1: '-r' is not an option"),
        ("--frob x\n", "requirements.txt:1: '--frob x' is not an option"),
        ("--index-url 'x\n", "No closing quotation"),
        ("../lib\n", "requirements.txt:1: ../lib is outside of the source folder"),
        ("-e ../lib\n", "outside of the source folder"),
        ("-e /opt/lib\n", "outside of the source folder"),
        ("lib @ file:///opt/lib\n", "outside of the source folder"),
        ("/opt/lib-1.whl\n", "outside of the source folder"),
        ("-r ../shared.txt\n", "outside of the source folder"),
        ("--find-links ../wheels\n", "outside of the source folder"),
        ("-r https://host/r.txt\n", "is not in the source folder"),
        ("./gone\n", "requirements.txt:1: there is no ./gone"),
        ("six==${NOWHERE}\n", "the variable NOWHERE is not set"),
        ("--index-url http://mirror/simple\n", "requirements.txt:1: packages from http://mirror"),
        ("--extra-index-url http://mirror/simple\n", "plain http"),
        ("--find-links http://mirror/\n", "plain http"),
        ("lib @ http://mirror/lib.whl\n", "plain http"),
        ("git+http://mirror/lib.git\n", "plain http"),
        ("-i http://u:pw@mirror/simple\n", "packages from http://****@mirror/simple come"),
    ],
)
def test_faults_name_the_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in fault_texts(parse(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "-i http://localhost:8080/simple\n",
        "-i http://127.0.0.1/simple\n",
        "-i http://[::1]:8/simple\n",
        "-i http://mirror/simple\n--trusted-host mirror\n",
        "-i http://mirror:81/simple\n--trusted-host mirror:81\n",
        "-i https://mirror/simple\n",
    ],
)
def test_plain_http_needs_a_trusted_host(tmp_path: Path, text: str) -> None:
    assert fault_texts(parse(tmp_path, text)) == ""


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    found = parse(tmp_path, "a b\n../x\n-r gone\n--no\n-i http://m/\n")
    assert len(fault_texts(found).splitlines()) == 5


def test_a_circle_of_three_files_is_reported(tmp_path: Path) -> None:
    found = parse(tmp_path, "-r a.txt\n", **{"a.txt": "-r b.txt\n", "b.txt": "\n-r a.txt\n"})
    assert fault_texts(found) == (
        "b.txt:2: the files include each other in a circle: a.txt → b.txt → a.txt"
    )


def test_a_symlink_out_of_the_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "lib").mkdir()
    (source / "lib").symlink_to(tmp_path / "lib")
    assert "outside of the source folder" in fault_texts(parse(source, "./lib\n"))


@pytest.mark.slow
@example(text="/\0")
@example(text="./" + "x" * 300)
@example(text="-r " + "x" * 300)
@example(text="--find-links ./" + "x" * 300)
@given(text=st.text(max_size=200))
def test_no_text_crashes_the_parser(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "requirements.txt").write_text(text, errors="surrogatepass")
    read_requirements(folder / "requirements.txt", folder, {})
